"""What every other package stands on: boxes, layers, numbers, seeds, files, processes. Imports none of them."""
