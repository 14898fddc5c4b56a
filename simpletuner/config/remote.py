"""Keys of remote datasets: a table of addresses, rows of a hub dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


SOURCES: Mapping[str, type[Group]] = {"csv": TableKeys, "huggingface": HubKeys}
REQUIRED = {
    "csv": ("csv_file", "csv_cache_dir", "csv_caption_column"),
    "huggingface": ("dataset_name",),
}


def check_source(name: str, source: str, keys: Mapping[str, Any], report: Problems) -> None:
    """Report missing keys of a type, and keys of another type.

    Args:
        name: id of the entry.
        source: type of the entry.
        keys: its explicit values, by key.
    """
    for key in REQUIRED.get(source, ()):
        if not keys.get(key):
            report.error(f"{name}.{key}", f"is required with type {source}.")
    for foreign, group in SOURCES.items():
        for key in sorted(group.model_fields.keys() & keys.keys() if foreign != source else ()):
            needed = " and ".join(REQUIRED[foreign])
            message = f"is for type {foreign}, which needs {needed}, too; the type is {source}. Leave it out."
            report.error(f"{name}.{key}", message)
    if source != "local" and keys.get("instance_data_dir"):
        report.error(f"{name}.instance_data_dir", f"is for type local; with type {source} files are downloaded.")
    if keys.get("streaming"):
        report.error(f"{name}.streaming", "is not possible: buckets need the sizes of all files.")
    composite = keys.get("composite_image_config")
    if composite is not None and composite.select_index >= composite.image_count:
        message = f"{composite.select_index} is beyond image_count {composite.image_count}, counted from 0."
        report.error(f"{name}.composite_image_config.select_index", message)
