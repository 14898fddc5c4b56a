"""The length of a run in steps and epochs, what is left of it, and whether every step has data."""

from __future__ import annotations

from simpletuner.config.optimizers import peak_learning_rate
from simpletuner.config.rates import learning_rate_at
from simpletuner.config.schema import DECAYING_SCHEDULERS, RunConfig, ScheduleConfig
from simpletuner.data.dataset import Dataset
from simpletuner.data.schedule import Origin, Schedule, Stretch, epochs_of, steps_of
from simpletuner.errors import Problem, Problems, counted, shorten
from simpletuner.planning.checkpoint_folder import Checkpoint
from simpletuner.planning.plans import Length, Plan, steps_before
from simpletuner.rounding import ceil_div

# A change of the learning rate by more than this share of it is worth a warning.
NOTICEABLE_JUMP = 0.1


def data_origin(config: RunConfig, resume: Checkpoint | None, *, same_data: bool) -> Origin:
    """Where the data of a session begins: with the epoch in which its checkpoint was saved.

    If the datasets have changed, an epoch that was not complete starts over.
    """
    batches_done = steps_before(config, resume) * config.schedule.gradient_accumulation_steps
    if resume is None:
        return Origin(1, batches_done)
    if not same_data:
        return Origin(next_epoch(resume), batches_done)
    progress = resume.manifest.progress
    if progress is None:  # older checkpoints do not record their position in the epoch
        return Origin()
    return Origin(resume.manifest.epoch, batches_done - progress.position)


def next_epoch(checkpoint: Checkpoint) -> int:
    """The epoch that follows a checkpoint if an incomplete epoch starts over."""
    progress = checkpoint.manifest.progress
    if progress is None:  # older checkpoints do not record whether their epoch is complete
        return checkpoint.manifest.epoch
    return progress.epochs_done + 1


def plan_length(config: ScheduleConfig, schedule: Schedule) -> Length:
    """Steps and epochs of a run: `max_train_steps`, else `num_train_epochs` (default 1).

    The remaining epochs of a continued run have the length that they have with today's data.
    """
    accumulation = config.gradient_accumulation_steps
    per_epoch = schedule.length(schedule.origin.epoch)
    steps = config.max_train_steps or 0
    if steps > 0:
        last_epoch = schedule.origin.epoch
        # The first epoch is empty if all datasets start later, which the checks report.
        if per_epoch:
            last_epoch = schedule.epoch_after(steps * accumulation - 1)
        return Length(steps, per_epoch, last_epoch)
    epochs = config.num_train_epochs or 1
    batches = schedule.before(epochs + 1)
    return Length(ceil_div(batches, accumulation), per_epoch, epochs)


def check_schedule(plan: Plan, report: Problems) -> None:
    """Every step needs a dataset, every dataset should get a step, and a session needs steps."""
    schedule = plan.sampler().schedule
    length = plan.length
    batches = length.total_steps * plan.config.schedule.gradient_accumulation_steps
    if counts_steps(plan):
        gap = schedule.gap(batches=batches)
    else:
        gap = schedule.gap(epochs=length.epochs)
    if gap is not None:
        report.error("data_backend_config", _describe_gap(plan, schedule, gap))
        return
    _check_left(plan, report)
    _check_rate(plan, report)
    for dataset in schedule.datasets:
        if _opens_later(dataset, schedule) and not schedule.takes_part(dataset, batches):
            run = f"{counted(length.total_steps, 'step')} and {counted(length.epochs, 'epoch')}"
            report.warn(
                dataset.id, f"never takes part in a run of {run}: its window is {_window(dataset)}."
            )


def length_key(plan: Plan) -> str:
    """The key that gives the length of the run."""
    return "max_train_steps" if counts_steps(plan) else "num_train_epochs"


def counts_steps(plan: Plan) -> bool:
    """Whether the length of the run is given in steps, not in epochs."""
    return bool(plan.config.schedule.max_train_steps)


def _describe_gap(plan: Plan, schedule: Schedule, gap: Stretch) -> str:
    """Which epoch no dataset takes part in, with the ways to fill or avoid it."""
    epoch = gap.epochs.start
    first = schedule.step_at(gap.before)
    starts = [steps_of(dataset).start for dataset in schedule.active(epoch)]
    later_starts = [step for step in starts if step > first]
    steps = f"from step {first} on"
    if later_starts:
        steps = f"in steps {first} to {min(later_starts) - 1}"
    windows = [f"{dataset.id} ({_window(dataset) or 'always'})" for dataset in schedule.datasets]
    message = (
        f"no dataset takes part {steps} (epoch {epoch}): {shorten(windows)}. Change a window to "
        "include it"
    )
    if first - 1 <= plan.steps_done:  # a shorter run would train nothing
        return f"{message}."
    shorter = f"num_train_epochs {epoch - 1}"
    if counts_steps(plan):
        shorter = f"max_train_steps {first - 1}"
    return f"{message}, or end the run before it with {shorter}."


def _window(dataset: Dataset) -> str:
    """The keys of the window that are set, with their values."""
    defaults = {"start_epoch": 1, "end_epoch": None, "start_step": 0, "end_step": None}
    limits = []
    for key, default in defaults.items():
        value = getattr(dataset.config, key)
        if value != default:
            limits.append(f"{key} {value}")
    return ", ".join(limits)


def _opens_later(dataset: Dataset, schedule: Schedule) -> bool:
    """Whether the window opens after this session has begun.

    A dataset whose window was open before may have taken part in an earlier session.
    """
    origin = schedule.origin
    if epochs_of(dataset).start > origin.epoch:
        return True
    return steps_of(dataset).start > schedule.step_at(origin.batches)


def _check_left(plan: Plan, report: Problems) -> None:
    """Refuse a session without a step, unless it only publishes the result of a complete run.

    The caches of a run can be looked at with any number of steps.
    """
    if plan.purpose == "caches":
        return
    total = plan.length.total_steps
    done = plan.steps_done
    resume = plan.resume
    key = length_key(plan)
    if total > done or total == 0:
        return
    if resume is None:
        report.error(
            key,
            f"{total} is not above init_lora_step {done}, whose steps count as trained: no step "
            f"is left. max_train_steps {done + total} trains {counted(total, 'step')}.",
        )
    elif total < done:
        if counts_steps(plan):
            length = f"{total} is below step {done}"
        else:
            length = f"{plan.length.epochs} is below epoch {resume.manifest.epoch}"
        report.error(key, f"{length} of {resume.path.name}: no step is left to train. Raise it.")
    elif not plan.same_data:
        finished = counted(plan.length.epochs, "epoch is", "epochs are")
        if counts_steps(plan):
            finished = counted(total, "step is", "steps are")
        message = (
            f"{finished} done, and the datasets have changed since: raise it to train on them."
        )
        report.append(Problem(key, message, fatal=plan.is_finished))


def _check_rate(plan: Plan, report: Problems) -> None:
    """Warn about a jump of the learning rate where a continued run has a new length.

    Its schedule is computed for the new length, not for the one that the checkpoint had.
    """
    config = plan.config.optimizer
    if config.lr_scheduler not in DECAYING_SCHEDULERS:
        return
    resume = plan.resume
    if resume is None or resume.manifest.progress is None:
        return
    total = plan.length.total_steps
    planned = resume.manifest.progress.total_steps
    if planned == total or total <= resume.step:
        return
    peak = peak_learning_rate(plan.config)
    before = learning_rate_at(resume.step - 1, config, peak, planned)
    after = learning_rate_at(resume.step, config, peak, total)
    if abs(after - before) <= NOTICEABLE_JUMP * max(after, before):
        return
    report.warn(
        "lr_scheduler",
        f"{config.lr_scheduler} was computed for {counted(planned, 'step')} and now is for "
        f"{total}: the learning rate goes from {before:.3g} in step {resume.step} to {after:.3g} "
        f"in step {resume.step + 1}. A lower learning_rate makes the jump smaller; lr_scheduler "
        "constant has none.",
    )
