"""What fits this machine, and how fast: predicted from bytes and bandwidths, with the reasons."""

from __future__ import annotations

from mlxmoe.tuning.planning import plan
from mlxmoe.tuning.report import ContextPlan, PlanReport

__all__ = ["ContextPlan", "PlanReport", "plan"]
