"""An interpreter in which no library of an extra is installed."""

LIBRARIES = (
    "datasets",
    "lm_eval",
    "matplotlib",
    "pyarrow",
    "sentencepiece",
    "tensorboard",
    "tokenizers",
    "wandb",
)
# Python raises ModuleNotFoundError for a module that is None in this table.
HIDE = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in LIBRARIES)
