"""What the commands do: options to results, across training, certification and exchange."""
