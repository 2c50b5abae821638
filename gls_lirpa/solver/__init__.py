"""Complete verification: branch and bound over unstable neurons or inputs, and the exact MILP, behind one door."""

from gls_lirpa.solver.search import Query, Solver
from gls_lirpa.solver.settings import SolverSettings
from gls_lirpa.solver.tree import Outcome

__all__ = ["Outcome", "Query", "Solver", "SolverSettings"]
