"""Fronts of natural against certified accuracy instead of points: search on held-out images, equal budgets."""
