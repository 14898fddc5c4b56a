"""What the HTML report of a run shows, gathered from the plan and the run's record."""

from __future__ import annotations

from dataclasses import dataclass, field

from simpletuner.data.sample import LedgerEntry
from simpletuner.plan.build import Plan
from simpletuner.reporting.environment import describe_environment
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, read, read_media
from simpletuner.reporting.report import REPORT_FILE, LedgerRow, ReportData, State, settings_of, write_report


@dataclass
class RunReport:
    """Writes `training_report.html` for one plan."""

    plan: Plan
    _environment: dict[str, str] = field(default_factory=describe_environment, init=False)

    def write(self, step: int, state: State = "running", message: str = "") -> None:
        """Rewrite the report as of a step."""
        plan = self.plan
        folder = plan.output_dir
        data = ReportData(
            title=plan.config.tracking.tracker_run_name,
            subtitle=f"{_kind(plan)} on {plan.spec.name} {plan.flavour.name}",
            state=state,
            step=step,
            total_steps=plan.length.total_steps,
            output_dir=folder,
            metrics=read(folder / METRICS_FILE),
            previews=read_media(folder / MEDIA_FILE),
            settings=settings_of(plan.config),
            ledger=[_row(entry) for dataset in plan.datasets for entry in dataset.ledger()],
            environment=self._environment,
            message=message,
            notes=[str(warning) for warning in plan.warnings],
        )
        write_report(folder / REPORT_FILE, data)


def _kind(plan: Plan) -> str:
    return "LoRA" if plan.config.model.model_type == "lora" else "full fine-tune"


def _row(entry: LedgerEntry) -> LedgerRow:
    geometry = entry.geometry
    return LedgerRow(
        dataset=entry.dataset_id,
        file=entry.name,
        used=not entry.use,
        size="x".join(map(str, entry.original_size)) if entry.original_size else "",
        bucket=entry.trained_size,
        crop=f"left {geometry.crop[0]}, top {geometry.crop[1]}" if geometry else "",
        reason=entry.use,
    )
