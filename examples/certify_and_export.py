"""Certify a network, look at radii, keep the records, and write it for other verifiers."""

import argparse
import tempfile
from pathlib import Path

from gls_lirpa import certified_radius, certify, zoo
from gls_lirpa.data import load_dataset
from gls_lirpa.exchange.export import write_instances, write_onnx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--samples", type=int, default=50)
parser.add_argument("--out", type=Path, default=None)
options = parser.parse_args()
out = options.out or Path(tempfile.mkdtemp())

model = zoo.load("digits-cnn3-crown-rgs")
x, y = load_dataset("digits").test.batch(range(options.samples))

result = certify(model, x, y, eps=0.1, timeout=10)
print(result)
for record in result[:3]:
    print(f"sample {record.index}: {record.verdict} by {record.stage}, bound {record.bound}")
result.save(out / "records")

radii = certified_radius(model, x[:5], y[:5], tolerance=0.01)
for i in range(5):
    print(f"sample {i}: safe within {radii.verified[i]:.3f}, counterexample at {radii.attacked[i]:.3f}")

write_onnx(model, x.shape[1:], out / "net.onnx")
table = write_instances(out / "net.onnx", x[:3], y[:3], out / "properties", eps=0.1, outputs=10, timeout=60.0)
print(f"network, properties and records: {table.parent.parent}")
