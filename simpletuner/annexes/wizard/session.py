"""A session of the wizard: questions, review, writing the file, and next steps."""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.annexes.draft import Draft, key_of
from simpletuner.annexes.start.media_folder import media_folder_of
from simpletuner.annexes.start.recipe import MODELS, RECIPES, TRIGGER, read_example
from simpletuner.annexes.wizard.questions import QUESTIONS, Question, stale_keys
from simpletuner.annexes.wizard.talk import HELP, NONE, NOTHING, PATIENCE, Back, InputEnded, Talk
from simpletuner.atomic import write_atomically
from simpletuner.budget.device import find_device
from simpletuner.config.device import HERE, AskedDevice, read_card_or_memory
from simpletuner.config.load import canonical
from simpletuner.config.records import without_removed
from simpletuner.config.schema import main_name, render_config
from simpletuner.config.sources import DATASET_FILE, EXAMPLES_ALIAS, read_json_layer
from simpletuner.config.types import typed
from simpletuner.errors import ConfigError, Problems, UserError
from simpletuner.redaction import redact

WELCOME = """\
Answer the questions, or press Enter for the value in [brackets].
? explains a question, - leaves a setting out, back returns to the previous question. Nothing is written until you
confirm at the end."""
NO_RECIPE = "none"
USUAL_FILES = 20  # file count assumed for a recipe's steps, since the wizard does not ask for a folder
# Not a setting of the run, so it is asked for the estimate at the end, and not written.
DEVICE = "device"
DEVICE_QUESTION = "GPU to estimate for, a card or its memory in GB (4090, 24)"
DEVICE_HELP = "Only the estimate below is for it: training uses the GPU of its machine."


def run_session(file: Path, talk: Talk) -> bool:
    """Ask, review and write; returns whether the file was written.

    Raises:
        UserError: the file cannot be read or written, or the input has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    check_target(file)
    talk.say("Settings for training", "bold")
    talk.say(WELCOME)
    draft = start_draft(file, talk)
    ask_all(draft, talk)
    if not review(draft, talk):
        talk.say("Nothing was written.")
        return False
    existed = file.exists()
    save(file, render_config(draft.values))
    talk.say()
    talk.tell(f"Written: {file}" + (f" (before: {backup_of(file)})" if existed else ""), "green")
    show_next_steps(draft, talk)
    return True


def ask_all(draft: Draft, talk: Talk) -> None:
    """Ask the questions that apply; `back` returns to the one before.

    Raises:
        InputEnded: there is no question to return to; piped input could go back forever.
    """
    position, answered, title, stuck = 0, list[int](), "", 0
    while position < len(QUESTIONS):
        question = QUESTIONS[position]
        if question.applies(draft):
            if question.section.label != title:
                title = question.section.label
                talk.say()
                talk.say(title, "bold cyan")
            try:
                talk.ask(question, draft)
            except Back:
                if answered:
                    position = answered.pop()
                    continue
                talk.refuse("This is the first question.")
                stuck += 1
                if stuck == PATIENCE:
                    raise InputEnded("There is no question before the first. Nothing was written.") from None
                continue
            answered.append(position)
        position += 1


def start_draft(file: Path, talk: Talk) -> Draft:
    """The initial draft, from the existing file, a recipe, or defaults."""
    if not file.exists() or not talk.confirm(f"{file} exists. Start from it?", default=True):
        return _new_draft(file, talk)
    problems = Problems()
    draft = Draft(file, load_values(file, problems))
    for problem in (each for each in problems if not each.fatal):
        talk.refuse(str(problem))
    return _usable(draft, talk)


def _new_draft(file: Path, talk: Talk) -> Draft:
    """An empty draft, or a draft with the settings of a recipe of `simpletuner start`, which the questions propose."""
    draft = Draft(file)
    choices = {NO_RECIPE: "the usual defaults", **{purpose: recipe.title for purpose, recipe in RECIPES.items()}}
    purpose = talk.pick("Start from a recipe? The questions propose its values.", choices)
    if purpose == NO_RECIPE:
        return draft
    recipe = RECIPES[purpose]
    example = read_example(recipe.example)
    draft.change({"model_family": example["model_family"], **recipe.values(recipe.steps(USUAL_FILES), TRIGGER)})
    if example["model_flavour"] != draft.spec.flavours[0].name:  # the flavour for edits
        draft.change({"model_flavour": example["model_flavour"]})
    return draft


def _usable(draft: Draft, talk: Talk) -> Draft:
    """The draft without the file's invalid keys, unless the user wants to keep them."""
    refused: dict[str, str] = {}
    for problem in draft.judgement.problems:
        if problem.fatal and key_of(problem) in draft.loaded:
            refused.setdefault(key_of(problem), problem.message)
    for key, reason in refused.items():
        talk.refuse(f"{key}: {reason}")
    if not refused or not talk.confirm("Training would refuse the above. Leave it out?", default=True):
        return draft
    talk.tell(f"Left out: {', '.join(refused)}", "yellow")
    return Draft(draft.file, {key: value for key, value in draft.values.items() if key not in refused})


def review(draft: Draft, talk: Talk) -> bool:
    """Show all settings, and ask again for settings that the user names, until the answer is yes or no."""
    owners = {question.key: question for question in QUESTIONS}
    device = ask_device(talk)
    declined: Mapping[str, Any] = {}
    while True:
        # None removes a key.
        draft.change(dict.fromkeys(stale_keys(draft, {})))
        is_refused, remedy = _show(draft, device, talk)
        # The user confirms a remedy before it is applied.
        if remedy and remedy != declined and not talk.defaults:
            words = ", ".join(f"{key} {json.dumps(value)}" for key, value in remedy.items())
            if talk.confirm(f"Apply {words}?", default=True):
                draft.change(remedy)
            declined = remedy
            continue
        act = f"Write {draft.file}"
        if draft.file.exists():
            act = f"Replace {draft.file}, and keep the old file as {backup_of(draft.file).name}"
        named = talk.choose(
            f"{act}? (or name a setting to change)", [*owners, DEVICE], default=talk.defaults or not is_refused
        )
        if not named:
            return named is None
        if named == DEVICE:
            device = ask_device(talk)
        else:
            _ask_again(owners[named], draft, talk)


def ask_device(talk: Talk) -> AskedDevice:
    """The GPU to estimate for; by default that of this machine."""
    here = "that of this machine" if find_device().is_gpu else "none"
    for _ in range(PATIENCE):
        answer = "" if talk.defaults else talk.read_line(f"  {DEVICE_QUESTION} [{here}]: ")
        if not answer or answer.lower() in (NONE, *NOTHING):
            return HERE
        if answer == HELP:
            talk.say(f"    {DEVICE_HELP}", "cyan")
            continue
        problems = Problems()
        device = read_card_or_memory(answer, problems)
        if not problems:
            return device
        talk.refuse("; ".join(problem.message for problem in problems))
    return HERE


def _ask_again(question: Question, draft: Draft, talk: Talk) -> None:
    """Ask a question, then further questions that apply because of its answer."""
    before, applied = _proposals(draft), _applying(draft)
    try:
        talk.ask(question, draft)
    except Back:
        return
    # Answers equal to an old proposal change with it: another model type has another learning rate.
    moved = {key: value for key, value in _proposals(draft).items() if key in before and before[key] != value}
    draft.change({key: value for key, value in moved.items() if draft.values.get(key) == before[key]})
    for further in QUESTIONS:
        if further not in applied and further != question and further.applies(draft):
            talk.ask(further, draft)


def _applying(draft: Draft) -> list[Question]:
    return [question for question in QUESTIONS if question.applies(draft)]


def _proposals(draft: Draft) -> dict[str, Any]:
    """The current proposals for keys that the file did not have."""
    asked = [question for question in _applying(draft) if question.key not in draft.loaded]
    return {question.key: question.propose(draft) for question in asked if question.propose is not None}


def _show(draft: Draft, device: AskedDevice, talk: Talk) -> tuple[bool, Mapping[str, Any]]:
    """Show all settings and the plan's verdict; returns whether training will refuse them, and a remedy."""
    # Imported here, since importing the plan would delay the first question.
    from simpletuner.annexes.wizard.verdict import judge

    _show_settings(draft.values, draft, talk)
    lines, problems = judge(draft, device)
    for line in lines:
        talk.tell(f"  {line}", "cyan")
    shown = dict.fromkeys([*draft.judgement.problems, *problems])
    fatal = {str(problem) for problem in shown if problem.fatal}
    for problem in shown:
        if problem.fatal or str(problem) not in fatal:
            talk.refuse(f"{'Training will refuse this' if problem.fatal else 'Note'}: {problem}")
    talk.say()
    is_refused = any(problem.fatal and problem.where != "device" for problem in shown)
    # Empty if the run fits, or if no settings make it fit.
    return is_refused, next((problem.remedy for problem in problems if problem.where == "memory"), {})


def _show_settings(values: Mapping[str, Any], draft: Draft, talk: Talk) -> None:
    talk.say()
    talk.say("Your settings", "bold")
    asked = [question.key for question in QUESTIONS if question.key in values]
    width = max(len(key) for key in values)
    for key in asked:
        talk.say(f"  {key:<{width}}  {redact(typed(values[key]))}")
    others = [key for key in values if key not in asked]
    for title, keys in (
        ("Follows from your answers", [key for key in others if key not in draft.loaded]),
        ("As before", [key for key in others if key in draft.loaded]),
    ):
        if keys:
            shown = (f"{key} {redact(json.dumps(values[key], ensure_ascii=False))}" for key in keys)
            talk.say(f"  {title}: {', '.join(shown)}")
    talk.say()


def check_target(file: Path) -> None:
    """Check, before the first question, that the file can be written.

    Raises:
        UserError: the file cannot be written.
    """
    if file.suffix in (".toml", ".env"):
        raise UserError(f"{file}: the wizard writes JSON; name a file such as config/config.json.")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file in it, such as {file / 'config.json'}.")
    # The nearest existing folder; folders below it are created when saving.
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{file} cannot be written: no permission in {folder}.")


def load_values(file: Path, report: Problems) -> dict[str, Any]:
    """The values in a file, unexpanded, by the canonical names of their keys; without keys of earlier versions.

    Raises:
        ConfigError: the file cannot be read.
    """
    layer = read_json_layer(file, report)
    if layer is None:
        raise ConfigError(report)
    canonical(layer, report)
    # `canonical` has named what is left out.
    named = {main_name(written): value for written, value in layer.values}
    values = without_removed(named, str(file), Problems())
    # An empty value means the default; an empty resume_from_checkpoint starts a new run.
    return {key: value for key, value in values.items() if value not in (None, "") or key == "resume_from_checkpoint"}


def save(file: Path, text: str) -> None:
    """Write a file atomically; the previous one is kept as `.bak`."""
    target = file.resolve()  # replaces the target of a link, not the link
    if target.is_file():
        # A copy, so that the file stays in place until the new one replaces it.
        write_atomically(backup_of(target), target.read_bytes())
    write_atomically(target, text)


def backup_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.bak")


def show_next_steps(draft: Draft, talk: Talk) -> None:
    """Show the next steps up to training, and offer to write a dataset file if there is none."""
    path, entries = Path(draft.dataset_file), example_datasets(draft)
    exists, noun, folder = path.expanduser().is_file(), draft.spec.media_noun, entries[0]["instance_data_dir"]
    # Scripts have already given all answers.
    asks = sys.stdin.isatty() and not exists and not talk.defaults
    if is_new := asks and talk.confirm(f"Also write {path}, for {noun} in {folder}?", default=True):
        save(path.expanduser(), json.dumps(entries, indent=2) + "\n")
    talk.tell()
    talk.tell("Next steps", "bold")
    if is_new:
        talk.tell(f"  1. Put your {noun} into {folder}, each with a caption in a .txt file of the same name.")
    elif exists:
        talk.tell(f"  1. Check your dataset file {path}; the wizard does not change it.")
    else:
        talk.tell(f"  1. Write the dataset file {path}, which says where your {noun} are, such as:")
        talk.tell(textwrap.indent(json.dumps(entries, indent=2), " " * 5), "dim")
    talk.tell(f"  2. Check:  {train_command(draft.file)} --dry-run")
    is_tiny = str(draft.values.get("pretrained_model_name_or_path")).startswith(EXAMPLES_ALIAS)
    where = "" if is_tiny or find_device().is_gpu else ", on a machine with a GPU"
    talk.tell(f"  3. Train{where}:  {train_command(draft.file)}")


def example_datasets(draft: Draft) -> list[dict[str, Any]]:
    """The content of an initial dataset file: a packaged example's, fitted to the files in its folder."""
    examples = MODELS["pairs"] if draft.judgement.flavour.task == "i2i" else (*MODELS["pictures"], *MODELS["clips"])
    example = next(name for name in examples if name.startswith(draft.spec.name))
    trained, *others = read_example(example, DATASET_FILE)
    # Clips have the length of previews.
    longest = draft.config.validation.validation_num_video_frames or 1
    return [media_folder_of(trained).fitted(trained, draft.spec, longest), *others]


def train_command(file: Path) -> str:
    """The shortest command that uses this config."""
    if file == Path("config.json") or (file == Path("config/config.json") and not Path("config.json").exists()):
        return "simpletuner train"
    folder = file.parent
    if file.name == "config.json" and folder.parent == Path("config"):
        return f"simpletuner train env={shlex.quote(folder.name)}"
    return f"simpletuner train config_path={shlex.quote(str(file))}"
