"""The settings of a run that datasets need, the defaults of their entries, and the display of long work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import CachingConfig, DatasetDefaults, RunConfig
from simpletuner.errors import Problem
from simpletuner.models.spec import FamilySpec, Task

if TYPE_CHECKING:
    # `discovery` imports this module.
    from simpletuner.data.discovery import Scan


class ProgressBar(Protocol):
    """Receives progress; whoever shows it stands above."""

    def advance(self, count: int = 1, note: str = "") -> None: ...


# Lists remote entries whose defaults are filled in, and may download them: what each consists of, by id.
Collect = Callable[[Sequence[DatasetConfig], "DataContext", list[Problem]], Mapping[str, "Scan"]]


@dataclass(frozen=True)
class DataContext:
    """The settings of a run that decide what is trained.

    Attributes:
        defaults: run-wide defaults of dataset keys.
        spec, task: the model family and the task of its flavour.
        latent_root: parent folder of the latent caches of datasets that name none.
        text_root: text cache of datasets that name none.
        download_root: parent folder of the downloads of datasets that name none.
        output_dir: of the run.
        frame_rate: default frames per second of clips; None for picture families.
        train_batch_size, gradient_accumulation_steps, num_processes: their product is one optimizer step; processes
            that share the tokens of samples count once.
        collect: the door to remote datasets; None refuses them.
        seed: for crop positions and random aspects. None, if the user set no seed, makes them depend on file names
            alone, so that the next run, which draws another seed, finds its latents in the cache.
        caching: of the run: how caches are written, which files are moved, and how many threads read files.
    """

    defaults: DatasetDefaults
    spec: FamilySpec
    task: Task
    latent_root: Path
    text_root: Path
    download_root: Path = Path("output/cache")
    output_dir: Path = Path("output")
    frame_rate: float | None = None
    train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_processes: int = 1
    collect: Collect | None = None
    seed: int | None = None
    caching: CachingConfig = field(default_factory=CachingConfig)

    @classmethod
    def of(cls, config: RunConfig, spec: FamilySpec, task: Task, collect: Collect | None = None) -> DataContext:
        """Select from a run's settings what concerns datasets."""
        run = config.run
        cache = Path(run.cache_dir or f"{run.output_dir}/cache")
        return cls(
            defaults=config.datasets,
            spec=spec,
            task=task,
            latent_root=Path(run.cache_dir_vae or cache / "vae").expanduser() / spec.name,
            text_root=Path(run.cache_dir_text or cache / "text").expanduser() / spec.name,
            download_root=cache.expanduser(),
            output_dir=Path(run.output_dir).expanduser(),
            frame_rate=config.validation.framerate or spec.frame_rate if spec.media == "video" else None,
            train_batch_size=config.schedule.train_batch_size,
            gradient_accumulation_steps=config.schedule.gradient_accumulation_steps,
            num_processes=config.launch.data_processes,
            collect=collect,
            # 0 and -1 ask for another seed in each run, see `DataContext.seed`.
            seed=run.seed if run.seed is not None and run.seed > 0 else None,
            caching=config.caching,
        )

    def fill(self, config: DatasetConfig) -> DatasetConfig:
        """The entry with all defaults filled in except `repeats`, where None means that the user did not set it."""
        unset = {key for key, value in config if value is None}
        values = {key: value for key, value in self._defaults(config).items() if key in unset}
        # From here on a remote dataset is the folder of its downloads.
        if config.type != "local":
            values["instance_data_dir"] = str(self._downloads(config))
        for key in ("instance_data_dir", "cache_dir", "cache_dir_vae", "csv_file"):
            if folder := values.get(key) or getattr(config, key):
                values[key] = str(Path(folder).expanduser())
        return config.model_copy(update=values)

    def _defaults(self, config: DatasetConfig) -> dict[str, Any]:
        """What an entry takes where it says nothing: the family's defaults, the run's, and what follows from others."""
        is_eval, random_crops = config.dataset_type == "eval", "random" in (config.crop_aspect, config.crop_style)
        family = {key: self.spec.defaults.get(key) for key in ("resolution", "aspect_bucket_alignment")}
        return {
            # What comes later wins: defaults of the run before those of the family.
            **family,
            **{key: value for key, value in self.defaults if value is not None},
            **({"caption_strategy": config.type} if config.type in ("csv", "huggingface") else {}),
            # Evaluation reads sample by sample (`BatchReader.read_sample`).
            "train_batch_size": 1 if is_eval else self.train_batch_size,
            "compress_cache": self.caching.compress_disk_cache,
            "vae_cache_disable": self.caching.vae_cache_disable,
            "delete_problematic_images": self.caching.delete_problematic_images,
            "delete_unwanted_images": self.caching.delete_unwanted_images,
            "cache_dir_vae": str(self.latent_root / _folder_name(config.id)),
            # Other crops would make the evaluation loss incomparable between epochs.
            "vae_cache_clear_each_epoch": config.crop and random_crops and not is_eval,
        }

    def _downloads(self, config: DatasetConfig) -> Path:
        """Where the files of a remote entry are downloaded to."""
        hub = (config.huggingface_cache_dir or config.cache_dir) if config.type == "huggingface" else None
        named = config.csv_cache_dir if config.type == "csv" else hub
        return Path(named or self.download_root / config.type / _folder_name(config.id))


def _folder_name(dataset_id: str) -> str:
    """The id without characters that could lead out of the cache folder."""
    name = "".join("_" if character in '/\\:*?"<>|' else character for character in dataset_id)
    return name.replace("..", "__")
