"""The view of a run specification: parameters, and bytes per stage, link and round."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from node.core.model.shapes import payload_layout
from node.views import run_history
from protocol.math.embedding_snapshot import BYTES_PER_VALUE
from protocol.math.flops import microbatch_flops, turning_flops
from protocol.memory.needs import BY_PRICE, members_left, memory_need
from protocol.run_files.link_text import width_text
from protocol.run_files.sources import sources_text
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.run import RunSpec
from protocol.types import StageRange


def _directions(spec: RunSpec, k: int) -> Iterator[tuple[str, int]]:
    """What a link of `k` carries, and bytes of one token, without its id and the framing.

    One line for both directions if they have the same number format.
    """
    link = spec.link
    activation, gradient = link.token_bytes(k or spec.model.width)
    if link.dtype_of_gradients == link.dtype:
        yield link.dtype, activation
    else:
        yield f"activations {link.dtype}", activation
        yield f"gradients {link.dtype_of_gradients}", gradient


def batch_text(spec: RunSpec) -> str:
    """Whether the batch of the swarm stays, and at how many samples."""
    if spec.grouping.batch == "variable":
        samples = spec.inner.microbatches * spec.inner.microbatch_size
        return f"{samples:,} samples of each replica and inner step"
    return f"{spec.global_batch:,} samples of all replicas together in an inner step"


def _option_rows(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """What options of the run change: the optimizer, and what replicas exchange but payloads for all."""
    if fewer := spec.lacks_second_moment(spec.model.layers):
        optimizer = spec.model.layers * turning_flops(spec.model) / spec.inner.microbatches
        usual = microbatch_flops(spec, range(spec.swarm.stages)) - optimizer
        saved, more = run_history.size(4 * fewer), optimizer / usual
        yield "optimizer", f"Muon: moments take {saved} less, and a step has {more:.1%} more operations"
        if (k := spec.outputs_k(0)) is not None:
            yield "export", f"as good as through links: layers before them write into their {k} dimensions"
        elif spec.link.may_compress and not spec.swarm.replicas:
            yield "export", "of pipelines alone, Muon's model is poor without their links: add a full replica"
    if every := spec.link.embedding_every:
        nbytes = BYTES_PER_VALUE * spec.model.vocabulary * spec.model.width
        size = run_history.size(nbytes)
        yield "embedding", f"every {every} rounds members without stage 0 fetch a snapshot of {size}"
    if spec.link.table:
        count, size = spec.link_table_parameters, run_history.size(16 * spec.link_table_parameters)
        yield "link tables", f"{count:,} parameters, {size} with moments, for each member behind a link"
    if spec.outer.turns > 1:
        yield "turns", "a round exchanges every second stage, in turn, and the last round all"
    if place := EXCHANGES[spec.outer.exchange].view:
        yield "exchange", pkgutil.resolve_name(place)(spec)


def _memory(spec: RunSpec) -> Table:
    """What the member with each stage needs, on a device of its own and in main memory, by policy."""
    table = Table("stage", *map(str, BY_PRICE), caption="GB on a card of its own + in main memory")
    for stage in range(spec.swarm.stages):
        stages = StageRange(stage, stage + 1)
        needs = (memory_need(spec, stages, members_left(spec, stages), "", policy) for policy in BY_PRICE)
        table.add_row(str(stage), *(f"{each.device / 1e9:.3g} + {each.main / 1e9:.3g}" for each in needs))
    return table


def spec_view(spec: RunSpec) -> RenderableType:
    """Parameters, and bytes per stage, link and round."""
    stages = Table("stage", "layers", "parameters", "float32", "payload per round", "against float32")
    total = 0
    for stage in range(spec.swarm.stages):
        parameters = spec.parameters_of(stage)
        payload = round(payload_layout(spec, stage).nbytes / spec.outer.turns)
        layers = spec.layers_of(stage)
        total += parameters
        stages.add_row(
            str(stage),
            f"{layers.start}-{layers.stop - 1}",
            f"{parameters:,}",
            run_history.size(4 * parameters),
            run_history.size(payload),
            run_history.ratio(4 * parameters, payload),
        )
    tokens = spec.inner.microbatches * spec.inner.microbatch_size * spec.model.context
    link = Table("link", "per token and direction", "per inner step and direction", "against float32")
    for k in spec.link.possible_ks:
        for text, per_token in _directions(spec, k):
            link.add_row(
                f"{width_text([k], spec.model.width)}, {text}",
                f"{per_token} B",
                run_history.size(per_token * tokens),
                run_history.ratio(4 * spec.model.width, per_token),
            )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", spec.name)
    facts.add_row("spec hash", spec.hash)
    facts.add_row("parameters", f"{total:,}")
    facts.add_row(
        "shape",
        f"full replicas: {spec.swarm.replicas}, pipelines of {spec.swarm.stages}: {spec.swarm.pipelines}",
    )
    usual = " unless it has another share" if spec.grouping.batch == "constant" else ""
    facts.add_row(
        "tokens", f"{tokens:,} per replica and inner step{usual}, H {spec.inner.steps}, {spec.rounds} rounds"
    )
    facts.add_row("batch", batch_text(spec))
    of_all = spec.global_batch * spec.model.context
    replicas = spec.swarm.replicas + spec.swarm.pipelines
    number = "any number of" if spec.grouping.batch == "constant" else f"{replicas}"
    facts.add_row("token budget", f"{spec.total_steps * of_all:,} with {number} replicas, {of_all:,} a step")
    facts.add_row("codec", payload_layout(spec, 0).codec)
    for name, text in _option_rows(spec):
        facts.add_row(name, text)
    facts.add_row("data", f"{sources_text(spec.data)}, tokenizer {spec.data.tokenizer}")
    return Group(Panel(facts, title=f"preset {spec.preset}"), stages, _memory(spec), link)
