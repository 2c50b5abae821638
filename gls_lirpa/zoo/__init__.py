"""Small certified networks that come with the package.

>>> import gls_lirpa
>>> model = gls_lirpa.zoo.load("digits-cnn3-crown-rgs")
>>> gls_lirpa.zoo.info("digits-cnn3-crown-rgs").eps
0.1
"""

from gls_lirpa.zoo.catalogue import PREFIX, ZooEntry, info, load, names, state

list = names

__all__ = ["PREFIX", "ZooEntry", "info", "list", "load", "names", "state"]
