"""Named specifications: small ones for tests and trials, and the paper's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# At the paper's sizes the end of a round differs by minutes between fast and slow replicas.
_TIMING = {"match_window": 1800.0, "fetch": 120.0, "decide": 300.0, "link": 300.0}
# At 32 of 4096 the table of the enumerative code is small, and decoding takes less time than applying.
_OUTER = {"indices": "enumerative"}
_PAPER = {"timing": _TIMING, "outer": _OUTER}
# H, and 32 samples per replica and step: 65,536 tokens of context 2048, 32,768 of context 1024.
_PAPER_INNER = {"steps": 50, "microbatches": 8, "microbatch_size": 4, "warmup_steps": 500}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "model": {},
        "inner": {"optimizer": "muon", "learning_rate": 1.2e-2},
        "outer": {"top_k": 128},
    },
    "nano": {
        "rounds": 3,
        "model": {"width": 32, "heads": 2, "feed_forward": 64, "context": 32},
        "inner": {"steps": 2, "microbatches": 2, "warmup_steps": 2},
        "outer": {"top_k": 128},
        "link": {"k": 8},
        "data": {"validation_batches": 1},
    },
    # The paper's models. docs/research.md says which of these numbers it prints, and which are derived.
    "178m": {
        **_PAPER,
        "rounds": 116,  # 3.04 billion tokens
        "model": {"vocabulary": 32000, "width": 1024, "layers": 9, "heads": 8, "feed_forward": 2688,
                  "context": 2048},
        # The paper's text; its table 9 prints 1e-3.
        "inner": {**_PAPER_INNER, "learning_rate": 3e-4},
        "link": {"k": 128},
        "swarm": {"stages": 4, "replicas": 4, "pipelines": 4},
    },
    "512m": {
        **_PAPER,
        "rounds": 391,  # 10.25 billion tokens
        # These dimensions have 427 million parameters. The name is the paper's.
        "model": {"vocabulary": 32000, "width": 1536, "layers": 12, "heads": 12, "feed_forward": 3904,
                  "context": 2048},
        "inner": {**_PAPER_INNER, "learning_rate": 1e-3},
        "link": {"k": 192},
        "swarm": {"stages": 4, "replicas": 4, "pipelines": 4},
    },
    "1b": {
        **_PAPER,
        "rounds": 3129,  # 10.25 billion tokens
        # The paper's table 9; elsewhere it prints width 1536.
        "model": {"vocabulary": 32000, "width": 2048, "layers": 16, "heads": 8, "feed_forward": 8192,
                  "context": 1024},
        "inner": {**_PAPER_INNER, "learning_rate": 1e-3},
        "link": {"k": 256},
        "swarm": {"stages": 4, "replicas": 1, "pipelines": 1},
    },
    # Llama 3's shape, for homes with a card of 16 GB: docs/reference/8b.md says what it needs of them.
    "8b": {
        **_PAPER,
        "rounds": 8139,  # 160 billion tokens, 20 for each parameter
        "model": {"vocabulary": 128256, "width": 4096, "layers": 32, "heads": 32, "key_value_heads": 8,
                  "feed_forward": 14336, "context": 2048},
        "inner": {**_PAPER_INNER, "microbatches": 32, "microbatch_size": 1, "optimizer": "muon",
                  "learning_rate": 3e-4},
        "link": {"k": 512, "dtype": "dither5", "gradient_dtype": "dither3", "embedding_every": 10},
        "swarm": {"stages": 10, "replicas": 2, "pipelines": 4},
    },
    # Of the paper's 70B only the size and the 4 stages are known: these are the dimensions of Llama 2 70B.
    "70b": {
        "rounds": 200,
        "model": {"vocabulary": 32000, "width": 8192, "layers": 80, "heads": 64, "key_value_heads": 8,
                  "feed_forward": 28672, "context": 2048},
        "inner": {**_PAPER_INNER, "microbatches": 128, "microbatch_size": 1, "learning_rate": 1.5e-4},
        "timing": {**_TIMING, "fetch": 1800.0, "decide": 3600.0},
        "outer": _OUTER,
        "link": {"k": 1024},
        "swarm": {"stages": 4, "replicas": 2, "pipelines": 2},
    },
}  # fmt: skip
