"""The types of datasets whose files are not in a folder, with their keys and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from simpletuner.config.option import Group, accepted, option
from simpletuner.config.types import Flag, Integer, Number, PathText, Text, TextList
from simpletuner.errors import Problems


class TableKeys(Group):
    """type csv: a table of addresses and captions."""

    csv_file: PathText | None = option(None)
    """The table; its first line names the columns."""
    csv_cache_dir: PathText | None = option(None)
    """Folder for downloads."""
    csv_caption_column: Text | None = option(None)
    """Column of captions."""
    csv_url_column: Text = option("url")
    """Column of http(s) addresses, or of paths relative to the table."""


class RowFilter(Group):
    """Filter for rows of a hub dataset."""

    collection: TextList | None = option(None)
    """Only rows whose column `collection` has one of these values."""
    quality_thresholds: dict[str, Number] | None = option(None)
    """Minimum of every quality metric."""
    quality_column: Text = option("quality_assessment")
    """Column with the object of metrics."""
    min_width: Integer | None = option(None, ge=1)
    """Minimum of the width column."""
    min_height: Integer | None = option(None, ge=1)
    """Minimum of the height column."""


class CompositeImage(Group):
    """Composite pictures: several side by side."""

    enabled: Flag = option(False)
    """Whether to crop one picture out."""
    image_count: Integer = option(1, ge=1)
    """Number of pictures side by side."""
    select_index: Integer = option(0, ge=0)
    """Index of the trained picture, counted from 0."""


class HubKeys(Group):
    """type huggingface: rows of a hub dataset."""

    dataset_name: Text | None = option(None)
    """owner/name on the hub, or a local folder."""
    split: Text = option("train")
    """Split to use."""
    revision: Text | None = option(None)
    """Branch, tag or commit; it is resolved to a commit."""
    image_column: Text = option("image")
    """Column of pictures."""
    video_column: Text = option("video")
    """Column of clips."""
    caption_column: TextList = option(["caption"])
    """Column of captions, or a list of columns; `meta.caption` selects a nested field."""
    fallback_caption_column: Text | None = option(None)
    """Used if the caption is empty."""
    description_column: Text | None = option(None)
    """Used if the fallback is empty too."""
    width_column: Text = option("width")
    """Column of widths, for filter_func."""
    height_column: Text = option("height")
    """Column of heights, for filter_func."""
    num_frames_column: Text | None = option(None)
    """Must exist; lengths are read from the clips."""
    fps_column: Text | None = option(None)
    """Must exist; rates are read from the clips."""
    huggingface_cache_dir: PathText | None = option(None)
    """Folder for downloads; cache_dir is an alias."""
    num_proc: Integer = option(16, ge=1)
    """Processes that prepare rows, at most the machine's cores."""
    auto_load: Flag = accepted(False, "rows are loaded when the run is planned")
    streaming: Flag = option(False)
    """Refused: buckets need all rows."""
    filter_func: RowFilter | None = option(None)
    """Which rows are used."""
    composite_image_config: CompositeImage | None = option(None)
    """Crops one picture out of several side by side."""


# The types of datasets whose files are not in a folder. A type is also the caption_strategy of the
# captions that come with its files.
SourceName = Literal["csv", "huggingface"]


class RemoteKeys(HubKeys, TableKeys):
    """The keys of all sources."""


@dataclass(frozen=True)
class Source:
    """A `type` of datasets whose files `annexes/remote` lists and downloads.

    Attributes:
        keys: the keys that only this type has.
        lister: the function that lists its files, as `module:function`; it is imported when a
            dataset has the type.
        required: those of the keys that must be set.
        folders: keys that may name the folder of downloads; the first that is set counts.
        unpaired: why its files cannot have partners in another dataset, worded to follow the type;
            empty if they can.
    """

    keys: type[Group]
    lister: str
    required: tuple[str, ...]
    folders: tuple[str, ...] = ()
    unpaired: str = ""

    def check(self, keys: Mapping[str, Any], report: Problems) -> None:
        """Report explicit values that no run can use, beyond what their types say."""


class HubSource(Source):
    """Rows of a hub dataset."""

    def check(self, keys: Mapping[str, Any], report: Problems) -> None:
        if keys.get("streaming"):
            report.error("streaming", "is not possible: buckets need the sizes of all files.")
        composite = keys.get("composite_image_config")
        if composite is not None and composite.select_index >= composite.image_count:
            message = (
                f"{composite.select_index} is beyond image_count {composite.image_count}, "
                "counted from 0."
            )
            report.error("composite_image_config.select_index", message)


SOURCES: Mapping[str, Source] = {
    "csv": Source(
        TableKeys,
        lister="simpletuner.annexes.remote.web_table:list_table",
        required=("csv_file", "csv_cache_dir", "csv_caption_column"),
        folders=("csv_cache_dir",),
        unpaired="names files by the hash of their address",
    ),
    "huggingface": HubSource(
        HubKeys,
        lister="simpletuner.annexes.remote.hub_rows:list_rows",
        required=("dataset_name",),
        folders=("huggingface_cache_dir", "cache_dir"),
    ),
}


def check_source(name: str, keys: Mapping[str, Any], report: Problems) -> None:
    """Report missing keys of a type, and keys of another type.

    Args:
        name: the type of an entry.
        keys: its explicit values, by key.
    """
    source = SOURCES.get(name)
    if source is not None:
        for key in source.required:
            if not keys.get(key):
                report.error(key, f"is required with type {name}.")
    for other_name, other in SOURCES.items():
        if other_name == name:
            continue
        needed = " and ".join(other.required)
        for key in sorted(other.keys.model_fields.keys() & keys.keys()):
            message = (
                f"is for type {other_name}, which needs {needed}, too; the type is {name}. "
                "Leave it out."
            )
            report.error(key, message)
    if source is None:
        return
    if keys.get("instance_data_dir"):
        message = f"is for type local; with type {name} files are downloaded."
        report.error("instance_data_dir", message)
    source.check(keys, report)
