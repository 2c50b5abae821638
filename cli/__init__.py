"""The ``glscert`` command line: options only; the work is done by gls_lirpa."""
