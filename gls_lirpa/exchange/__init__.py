"""Networks and properties from elsewhere, and ours for others: ONNX and VNN-LIB."""
