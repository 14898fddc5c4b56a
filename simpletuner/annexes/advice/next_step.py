"""The sentence on what to do next with a run, with its reason; none where the facts do not decide.

The rules are in the order of what matters most: a run that failed or has not ended, files that were
not trained, then the loss on held-out files, then previews, then the quality of the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Literal

from simpletuner.annexes.advice.curve import LossCurve
from simpletuner.annexes.advice.facts import Facts
from simpletuner.annexes.languages.say import say, say_counted
from simpletuner.rounding import ceil_div, round_up

Kind = Literal["take", "continue", "change", "caption", "files"]

NOT_FINITE = re.compile(r"The loss is [^.]*\b(?:nan|inf)\b|\bNaN or infinite\b")
# More than a fifth of the files is more than a few exceptions.
MANY = 0.2
FEW_FILES = 5
# Mean levels of 255 by which a preview must differ from that of the untrained model. Runs that
# learn change it by 5 and more, runs at a vanishing learning rate by less than 0.5.
VISIBLE = 1.0
# The usual settings of docs/TROUBLESHOOTING.md.
STEPS_PER_FILE = 50
USUAL_RATE = 1e-4
LARGEST_RATE = 0.1  # of optimizers that choose the rate themselves, higher values are a factor
# The training loss is compared between tenths of a run. It diverges if the last one has more than
# twice the loss of the lowest, since the drawn noise levels alone change such means by less.
TENTHS = 10
FEWEST_IN_TENTH = 10
DIVERGED = 2.0
HEALTHY = 1.2  # times the lowest mean, up to which it has not grown yet
CERTAIN = 4  # standard errors
# A share by which the training loss falls clearly.
CLEAR_FALL = 0.05
FEWEST_COMPARED = 20  # losses on either side


@dataclass(frozen=True)
class NextStep:
    """What to do next with a run, and why.

    Attributes:
        sentence: one sentence in plain words: the action, a colon, the reason.
        step: the checkpoint to take; None if there is none, or if it is the result.
        settings: settings to continue or start again with.
        keys: other keys that it is about, and where they are.
    """

    kind: Kind
    sentence: str
    step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    keys: str = ""

    def in_terminal(self, folder: Path) -> str:
        """The sentence, and what to type or open for it.

        Args:
            folder: the output folder of the run.
        """
        how = [f"{key}={value}" for key, value in self.settings.items()]
        if self.step is not None:
            how.append(str(folder / f"checkpoint-{self.step}"))
        if self.keys:
            how.append(self.keys)
        return f"Next: {self.sentence} ({', '.join(how)})" if how else f"Next: {self.sentence}"


def next_step(facts: Facts) -> NextStep | None:
    """What to do next; None where the facts do not decide."""
    for rule in RULES:
        step = rule(facts)
        if step is not None:
            return step
    return None


def after_failure(facts: Facts) -> NextStep | None:
    """A run that ended with NaN, or whose training loss has grown."""
    growth = growth_of_loss(facts.losses)
    if facts.state == "failed" and NOT_FINITE.search(facts.message):
        reason = say(
            "the loss or the weights became NaN or infinite after step {step}",
            step=f"{facts.step:,}",
        )
    elif growth is not None:
        reason = say(
            "the training loss rose from {before} to {after}",
            before=f"{growth.before:.3g}",
            after=f"{growth.after:.3g}",
        )
    else:
        return None
    rate = peak(facts.rates)
    change = say("lower the learning rate")
    settings: dict[str, Any] = {}
    if 0 < rate < LARGEST_RATE:
        lower = rounded(rate / 3)
        settings["learning_rate"] = lower
        change = say(
            "lower the learning rate from {rate} to {lower}",
            rate=f"{rate:.3g}",
            lower=f"{lower:.3g}",
        )
    again = say("start again")
    # The record may begin later than the run.
    end = facts.step if growth is None else facts.step - len(facts.losses) + growth.began
    healthy = [step for step in facts.checkpoints if step <= end]
    if healthy:
        settings["resume_from_checkpoint"] = str(healthy[-1])
        again = say("continue from checkpoint {step}", step=healthy[-1])
    action = say("{change} and {again}", change=change, again=again)
    if facts.state == "running":
        action = say("stop, {action}", action=action)
    action = f"{action[0].upper()}{action[1:]}"
    return NextStep("change", because(action, reason), None, settings)


def because(action: str, reason: str) -> str:
    """The sentence of an action and its reason."""
    return say("{action}: {reason}.", action=action, reason=reason)


@dataclass(frozen=True)
class Growth:
    """A training loss that has grown.

    Attributes:
        before: the lowest mean of a tenth of the run.
        after: the mean of the last tenth.
        began: the number of losses after which it grew.
    """

    before: float
    after: float
    began: int


def growth_of_loss(losses: Sequence[float]) -> Growth | None:
    """How the training loss has grown; None unless it has diverged."""
    length = len(losses) // TENTHS
    if length < FEWEST_IN_TENTH:
        return None
    ends = range(length, length * TENTHS, length)
    tenths = {end: losses[end - length : end] for end in ends}
    last = losses[-length:]
    lowest = min(tenths.values(), key=fmean)
    before = fmean(lowest)
    after = fmean(last)
    if after <= DIVERGED * before or after - before <= CERTAIN * error_of(last, lowest):
        return None
    healthy = [end for end, tenth in tenths.items() if fmean(tenth) <= HEALTHY * before]
    return Growth(before, after, healthy[-1])


def error_of(first: Sequence[float], second: Sequence[float]) -> float:
    """The standard error of the difference between two means."""
    variances = [stdev(values) ** 2 / len(values) for values in (first, second)]
    return sum(variances) ** 0.5


def caption_files(facts: Facts) -> NextStep | None:
    """Many files are left out, since they have no caption."""
    missing = facts.files.uncaptioned
    if not missing or facts.files.trained is None:
        return None
    files = facts.files.trained + missing
    if missing <= MANY * files:
        return None
    reason = say_counted(
        missing,
        "{count} of {files} files have no caption and is not trained",
        "{count} of {files} files have no caption and are not trained",
        files=f"{files:,}",
    )
    action = say("Write the missing captions and train again")
    return NextStep("caption", because(action, reason), keys="simpletuner caption")


def take_before_rise(facts: Facts) -> NextStep | None:
    """The loss on held-out files has risen since its lowest point."""
    curve = facts.curve
    if curve is None or curve.trend != "rising":
        return None
    step, lowest = curve.points[curve.best]
    last = curve.points[-1][1]
    figures = {"step": f"{step:,}", "lowest": f"{lowest:.4g}", "last": f"{last:.4g}"}
    kept = nearest_step(facts.checkpoints, step)
    if kept is None:
        sentence = say(
            "Train again for {step} steps: the loss on held-out files was lowest at step {step} "
            "({lowest}) and has risen to {last}, and no checkpoint is kept.",
            **figures,
        )
        return NextStep("change", sentence, None, {"max_train_steps": step})
    take = say("Take checkpoint {step}", step=kept)
    if facts.state == "running":
        take = say("Stop and take checkpoint {step}", step=kept)
    if kept == step:
        sentence = say(
            "{take}: the loss on held-out files has risen since, from {lowest} to {last}.",
            take=take,
            **figures,
        )
    else:
        sentence = say(
            "{take}, of those that are kept the nearest to step {step}: the loss on held-out files "
            "was lowest there ({lowest}) and has risen to {last}.",
            take=take,
            **figures,
        )
    keys = "" if kept == step else "a larger checkpoints_total_limit keeps more"
    return NextStep("take", sentence, kept, keys=keys)


def nearest_step(steps: Sequence[int], step: int) -> int | None:
    """The nearest of some steps, the earlier of two; None if there are none."""
    return min(steps, key=lambda candidate: (abs(candidate - step), candidate), default=None)


def go_on(facts: Facts) -> NextStep | None:
    """The run has not reached its end."""
    left = facts.total_steps - facts.step
    if facts.state != "stopped" or left <= 0 or not facts.step:
        return None
    if not facts.checkpoints:
        sentence = say(
            "Start again and save more often: the run ended at step {step}, before its first "
            "checkpoint.",
            step=f"{facts.step:,}",
        )
        return NextStep("change", sentence, keys="checkpoint_step_interval")
    last = facts.checkpoints[-1]
    lost = facts.step - last
    reached = {"step": f"{facts.step:,}", "total": f"{facts.total_steps:,}"}
    if lost <= 0:
        reason = say("{left} of {total} steps are left", left=f"{left:,}", total=reached["total"])
    else:
        reason = say_counted(
            lost,
            "the run ended at step {step} of {total}, one step later",
            "the run ended at step {step} of {total}, and the {count} steps in between are trained "
            "again",
            **reached,
        )
    action = say("Continue from step {step}", step=f"{last:,}")
    return NextStep("continue", because(action, reason))


def train_longer(facts: Facts) -> NextStep | None:
    """The loss on held-out files was still falling at the end."""
    curve = facts.curve
    if facts.state != "finished" or curve is None or curve.trend != "falling":
        return None
    began, before = curve.points[curve.third]
    end, last = curve.points[-1]
    steps = half_as_long_again(facts, curve)
    sentence = say(
        "Continue to step {steps}: the loss on held-out files was still falling at the end, from "
        "{before} at step {earlier} to {after} at step {last}.",
        steps=f"{steps:,}",
        before=f"{before:.4g}",
        earlier=f"{began:,}",
        after=f"{last:.4g}",
        last=f"{end:,}",
    )
    return NextStep("continue", sentence, None, {"max_train_steps": steps})


def half_as_long_again(facts: Facts, curve: LossCurve) -> int:
    """One and a half times the length of the run, in whole intervals of its evaluation."""
    interval = curve.points[1][0] - curve.points[0][0]
    return round_up(ceil_div(facts.step * 3, 2), interval)


def learn_more(facts: Facts) -> NextStep | None:
    """The previews still look like those of the untrained model."""
    if facts.state != "finished" or not facts.changes or max(facts.changes) >= VISIBLE:
        return None
    reason = say("the last previews cannot be told from those of the untrained model")
    rate = peak(facts.rates)
    files = facts.files.trained
    # As docs/TROUBLESHOOTING.md advises: first the usual length, then a higher rate.
    is_short = files is not None and facts.step < STEPS_PER_FILE * files
    if rate >= LARGEST_RATE or (is_short and rate >= USUAL_RATE):
        steps = facts.step * 2
        action = say("Continue to step {step}", step=f"{steps:,}")
        return NextStep("continue", because(action, reason), None, {"max_train_steps": steps})
    if rate <= 0:
        action = say("Set a learning rate above 0 and train again")
        return NextStep("change", because(action, reason), keys="learning_rate")
    higher = max(USUAL_RATE, rounded(rate * 2))
    action = say(
        "Raise the learning rate from {rate} to {higher} and train again",
        rate=f"{rate:.3g}",
        higher=f"{higher:.3g}",
    )
    return NextStep("change", because(action, reason), None, {"learning_rate": higher})


def leave_out_small(facts: Facts) -> NextStep | None:
    """Many files are smaller than they are trained."""
    files = facts.files
    is_usual = files.enlarged <= MANY * files.measured
    if facts.state == "failed" or not files.measured or is_usual:
        return None
    sentence = say(
        "Leave out small files or lower the resolution: {enlarged} of {measured} files are "
        "enlarged, and the model learns their blur.",
        enlarged=f"{files.enlarged:,}",
        measured=f"{files.measured:,}",
    )
    keys = "minimum_image_size or resolution in the dataset file"
    return NextStep("files", sentence, keys=keys)


def leave_out_twins(facts: Facts) -> NextStep | None:
    """Some files seem to be the same in two formats."""
    twins = facts.files.twins
    if facts.state == "failed" or not twins:
        return None
    sentence = say(
        "Leave out one of {twins}: they seem to be the same, which is then trained twice as often.",
        twins=twins,
    )
    return NextStep("files", sentence, keys="exclude_files in the dataset file")


def add_files(facts: Facts) -> NextStep | None:
    """Very few files were trained."""
    files = facts.files
    if facts.state != "finished" or files.trained is None or files.trained >= FEW_FILES:
        return None
    trained = f"{files.trained} {files.noun} were"
    if files.trained == 1:
        trained = f"1 {files.noun.removesuffix('s')} was"
    sentence = (
        f"Add {files.noun} and train again: only {trained} trained, which the model learns by "
        "heart."
    )
    return NextStep("files", sentence)


def take_result(facts: Facts) -> NextStep | None:
    """The loss on held-out files stays level: the run has got as far as it goes."""
    curve = facts.curve
    if facts.state != "finished" or curve is None or curve.trend != "level":
        return None
    since = curve.level_since
    memorised = later_fall(facts, since)
    kept = [step for step in facts.checkpoints if since <= step < facts.step]
    if memorised is not None and kept:
        before, after = memorised
        sentence = say(
            "Take checkpoint {step}: since step {since} the loss on held-out files is level "
            "({loss}), and only that on trained files falls, from {before} to {after}.",
            step=kept[0],
            since=f"{since:,}",
            loss=f"{curve.losses[-1]:.4g}",
            before=f"{before:.3g}",
            after=f"{after:.3g}",
        )
        return NextStep("take", sentence, kept[0])
    sentence = say(
        "Use the result: the loss on held-out files is level since step {since} ({loss}), and no "
        "checkpoint has a clearly lower one.",
        since=f"{since:,}",
        loss=f"{curve.losses[-1]:.4g}",
    )
    return NextStep("take", sentence)


def later_fall(facts: Facts, since: int) -> tuple[float, float] | None:
    """Training losses in the two halves after a step; None unless the loss falls clearly."""
    count = min(facts.step - since, len(facts.losses))
    after = facts.losses[len(facts.losses) - count :]
    half = count // 2
    if half < FEWEST_COMPARED:
        return None
    first = after[:half]
    second = after[half:]
    fall = fmean(first) - fmean(second)
    if fall <= max(CLEAR_FALL * fmean(first), CERTAIN * error_of(first, second)):
        return None
    return fmean(first), fmean(second)


def peak(rates: Sequence[float]) -> float:
    """The highest learning rate; 0 without any."""
    return max(rates, default=0.0)


def rounded(value: float) -> float:
    """A value with one digit."""
    return float(f"{value:.0e}")


RULES: Sequence[Callable[[Facts], NextStep | None]] = (
    after_failure,
    caption_files,
    take_before_rise,
    go_on,
    train_longer,
    learn_more,
    leave_out_small,
    leave_out_twins,
    add_files,
    take_result,
)
