"""Complete verification: branch and bound over unstable neurons or inputs, and the exact MILP, behind one door."""

from gls_lirpa.solver.query import Query, SearchOutcome
from gls_lirpa.solver.search import Solver
from gls_lirpa.solver.settings import SolverSettings

__all__ = ["Query", "SearchOutcome", "Solver", "SolverSettings"]
