"""What fits this machine, and how fast: predicted from bytes and bandwidths, or measured, with the reasons."""

from __future__ import annotations

from mlxmoe.tuning.planning import plan
from mlxmoe.tuning.report import ContextPlan, PlanReport, TogetherPlan
from mlxmoe.tuning.tuned_report import PrefillRow, TuneReport, TuneRow
from mlxmoe.tuning.tuner import tune

__all__ = ["ContextPlan", "PlanReport", "PrefillRow", "TogetherPlan", "TuneReport", "TuneRow", "plan", "tune"]
