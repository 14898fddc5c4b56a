"""`simpletuner caption`: writes captions for files that have none."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from simpletuner.annexes.captions.address import Address, api_key, read_address
from simpletuner.annexes.captions.wording import Wording, check_captions, uncaptioned, unread
from simpletuner.annexes.captions.writing import Captioner, described, write_captions
from simpletuner.annexes.report.html import thin
from simpletuner.cli.process import without_gc
from simpletuner.cli.settings import logged_events, plan_survey
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand
from simpletuner.errors import UserError
from simpletuner.planning.plans import Survey
from simpletuner.reporting.events import EventStream

PREVIEWED = 3
SEND = "To allow it, add --send-to-network."
app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def caption(
    context: typer.Context,
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="ID", help="Only this dataset.")
    ] = None,
    style: Annotated[
        Literal["short", "long", "tags"], typer.Option("--style", help="How to describe.")
    ] = "long",
    trigger: Annotated[
        str, typer.Option("--trigger", metavar="WORD", help="First words of every caption.")
    ] = "",
    preview: Annotated[
        bool, typer.Option("--preview", help="Show three captions, write nothing.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="At most this many files.")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            "--address",
            metavar="URL",
            help="A server that speaks OpenAI's protocol, instead of the checkpoint: LM Studio, "
            "Ollama. Its key is read from CAPTION_API_KEY.",
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="The server's model.")] = "",
    send_to_network: Annotated[
        bool,
        typer.Option("--send-to-network", help="Allow a server that is not this machine."),
    ] = False,
    without_key: Annotated[bool, typer.Option("--without-key", hidden=True)] = False,
) -> None:
    """Write a .txt caption for each picture or clip that has none, with the checkpoint's
    Qwen2.5-VL or by a server of your own.

    Existing captions are kept, so a repeated call continues an interrupted one. Takes the settings
    of train.
    """
    server = _checked_address(address, model, may_send=send_to_network)
    # A survey accepts files without captions; a plan for training does not.
    survey = plan_survey(context.args)
    wording = Wording(style, trigger)
    check_captions(survey, wording, dataset, by_server=server is not None)
    files = list(uncaptioned(survey.datasets, dataset))[:limit]
    noun = survey.spec.media_noun
    with logged_events() as events:
        for note in unread(files):
            events.notify(note, warning=True)
        # A second call on a captioned folder ends at once.
        if not files:
            events.notify("Every picture and clip has a caption.")
            return
        if server is None:
            captioner = _open_checkpoint(survey, wording, events)
        else:
            key = "" if without_key else api_key()
            captioner = _open_server(server, model, wording, key, events)
        if preview:
            shown = thin(files, PREVIEWED)
            for file, text in described(captioner, shown, wording, events, noun):
                events.notify(f"{file.path}\n  {text}")
        else:
            written = write_captions(captioner, files, wording, events, noun)
            events.notify(f"Captions written: {written}; files left out: {len(files) - written}.")


def _checked_address(text: str, model: str, *, may_send: bool) -> Address | None:
    """The server that writes captions; None for the checkpoint.

    Raises:
        UserError: the options contradict each other, or pictures would leave this machine.
    """
    if not text:
        if model or may_send:
            option = "--model" if model else "--send-to-network"
            raise UserError(f"{option} belongs to --address, which is not given.")
        return None
    try:
        address = read_address(text)
        address.check_consent(may_send=may_send, remedy=SEND)
    except UserError as error:
        raise UserError(f"--address: {error}") from None
    return address


def _open_checkpoint(survey: Survey, wording: Wording, events: EventStream) -> Captioner:
    with events.phase("Loading torch"), without_gc():
        # At the wall: torch comes with the model, so only once there is something to write.
        from simpletuner.annexes.captions.captioner import checkpoint_captioner
    return checkpoint_captioner(survey, wording, events)


def _open_server(
    address: Address, model: str, wording: Wording, key: str, events: EventStream
) -> Captioner:
    # The client takes 0.1 s to import.
    from simpletuner.annexes.captions.address_captioner import AddressCaptioner

    captioner = AddressCaptioner(address, model, wording.style, key)
    events.notify(f"The pictures are sent to {address.described}, to the model {captioner.model}.")
    return captioner
