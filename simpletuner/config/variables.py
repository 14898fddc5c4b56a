"""The environment variables that a run obeys, for the reference page.

Each is read where it is needed; a test compares this list with the code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable, or several names for the same thing.

    `reader` names the package that reads it where that is not simpletuner itself.
    """

    names: tuple[str, ...]
    meaning: str
    default: str = ""
    reader: str = ""


VARIABLES = (
    Variable(
        ("SIMPLETUNER_ENV", "SIMPLETUNER_ENVIRONMENT", "ENV"),
        "Name of the configuration: `config/NAME/config.json`, like `env=NAME` on the command line.",
        "`default`, which names none",
    ),
    Variable(("CONFIG_PATH",), "The configuration file itself, with or without its ending."),
    Variable(("CONFIG_BACKEND", "CONFIG_TYPE"), "Look only for `json`, `toml` or `env` files.", "all, in that order"),
    Variable(("SIMPLETUNER_CONFIG_DIR",), "One more folder in which `env=NAME` is looked for."),
    Variable(
        ("TRAINER_EXTRA_ARGS",),
        "Settings appended to the command line, split at white space. The last of two values for a key wins, with a "
        "warning.",
    ),
    Variable(("MIXED_PRECISION",), "Stands for `mixed_precision` where neither file nor command line sets it.", "bf16"),
    Variable(
        ("TRAINING_NUM_PROCESSES", "TRAINING_NUM_MACHINES"),
        "Stand for `num_processes` and `num_machines` in the same way.",
        "1",
    ),
    Variable(("TRAINING_DYNAMO_BACKEND",), "Stands for `dynamo_backend` in the same way."),
    Variable(("CC", "CXX"), "The C compiler that compiled blocks need.", "`cc`, `gcc`, `clang`, `g++`", "torch"),
    Variable(("ACCELERATE_EXTRA_ARGS",), "Has no effect yet, and a warning says so.", ""),
    Variable(("SIMPLETUNER_LOG_LEVEL",), "DEBUG, INFO, WARNING or ERROR on the terminal.", "INFO"),
    Variable(("OMP_NUM_THREADS",), "Compute threads on a CPU, where `torch_num_threads` is larger.", "the cores"),
    Variable(
        ("SIMPLETUNER_ALLOW_MODIFYING_BSZ",), "1 allows another `train_batch_size` when a run is continued.", "0"
    ),
    Variable(
        ("SIMPLETUNER_MAXIMUM_IMAGE_SIZE_OVERRIDE",),
        "1 allows a `maximum_image_size` that looks like the wrong unit.",
        "0",
    ),
    Variable(("VENV_PATH",), "The Python environment that `train.sh` uses.", "the active one, `.venv`, `venv`",
             "train.sh"),
    Variable(("HF_ENDPOINT",), "Another address for the hub, such as a mirror.", "", "huggingface_hub"),
    Variable(("HF_HOME",), "Folder for models and logins of the hub.", "`~/.cache/huggingface`", "huggingface_hub"),
    Variable(("HF_TOKEN",), "Login of the hub; `hf auth login` stores one for good.", "", "huggingface_hub"),
    Variable(("WANDB_API_KEY",), "Login of wandb; `wandb login` stores one for good.", "", "wandb"),
    Variable(("WANDB_MODE",), "`offline` writes wandb files without sending them, and needs no login.", "online",
             "wandb"),
)  # fmt: skip
