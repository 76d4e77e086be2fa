"""Whether a variation can be applied to the replicas of a specification."""

from __future__ import annotations

from node.experiment.variation import Variation
from protocol.spec.run import RunSpec


def check(spec: RunSpec, variation: Variation) -> None:
    """Raise ValueError with the reason if `variation` cannot be applied to replicas of `spec`."""
    if spec.initial is not None:
        raise ValueError(
            "an experiment starts from the seed, and this specification from parameters that were imported"
        )
    if variation.reducer_leaves_every and spec.outer.exchange != "reduced":
        raise ValueError("reducer_leaves_every needs reducers, and outer.exchange is 'gathered'")
    _check_replicas(spec, variation)
    _check_links(spec, variation)
    _check_tables(spec, variation)
    _check_rounding(spec, variation)


def _check_replicas(spec: RunSpec, variation: Variation) -> None:
    if variation.average_gradients and spec.grouping.weights == "measured":
        raise ValueError("grouping.weights 'measured' has no effect where replicas average their gradients")
    if variation.basis_every and not spec.swarm.replicas:
        raise ValueError("basis_every follows what full replicas see, and there are none")
    if variation.projected_share and not (spec.swarm.replicas and spec.link.k):
        raise ValueError("projected_share needs full replicas, and links that compress")
    if variation.average_gradients and _has_links(spec) and (spec.link.table or variation.trained_ends):
        raise ValueError(
            "replicas that average their gradients are clipped alike, but a link.table or trained_ends have "
            "gradients of one replica alone"
        )
    if variation.average_gradients and spec.outer.turns > 1:
        raise ValueError("outer.turns has no effect where gradients are averaged")
    replicas = spec.swarm.replicas + spec.swarm.pipelines
    if any(count > replicas for _, count in variation.replicas_by_round):
        raise ValueError(f"replicas_by_round has more than the {replicas} replicas of the specification")
    if variation.replicas_by_round and spec.outer.overlap:
        raise ValueError("replicas_by_round needs rounds without overlap")


def _check_links(spec: RunSpec, variation: Variation) -> None:
    if spec.link.embedding_every:
        raise ValueError("a variation sets embedding_every, and link.embedding_every is not 0")
    if variation.grassmann_every and not _has_links(spec):
        raise ValueError("grassmann_every follows what links lose, and there are none")
    if not spec.link.k and (variation.grassmann_every or variation.weight_projection):
        raise ValueError("grassmann_every and weight_projection need links that compress, and link.k is 0")
    if variation.uncompressed_pipelines > (spec.swarm.pipelines if _has_links(spec) else 0):
        raise ValueError(
            f"{variation.uncompressed_pipelines} uncompressed_pipelines of {spec.swarm.pipelines} pipelines"
        )
    for _, k in variation.k_by_round:
        if k > spec.model.width:
            raise ValueError(f"k_by_round has k {k}, which exceeds model.width {spec.model.width}")


def _check_tables(spec: RunSpec, variation: Variation) -> None:
    if variation.share_tables and not (spec.link.table and _has_links(spec)):
        raise ValueError("share_tables needs pipelines and link.table")
    if variation.share_tables and (spec.outer.overlap or variation.replicas_by_round):
        raise ValueError("share_tables needs rounds without overlap, and no replicas_by_round")
    if variation.share_tables and variation.uncompressed_pipelines:
        raise ValueError(
            "tables behind uncompressed_pipelines are not trained, so share_tables cannot mix them"
        )


def _check_rounding(spec: RunSpec, variation: Variation) -> None:
    are_int4 = spec.link.dtype == spec.link.dtype_of_gradients == "int4"
    if variation.stochastic_rounding and not (_has_links(spec) and are_int4):
        raise ValueError("stochastic_rounding needs links whose activations and gradients are int4")
    if variation.link_feedback and not _has_links(spec):
        raise ValueError("link_feedback needs links")
    if variation.link_feedback and spec.inner.microbatches < 2:
        raise ValueError("link_feedback goes from one microbatch to the next, and inner.microbatches is 1")
    for name in ("rotation", "trained_ends"):
        if getattr(variation, name) and not (_has_links(spec) and spec.link.k):
            raise ValueError(f"{name} needs links that compress")


def _has_links(spec: RunSpec) -> bool:
    return spec.swarm.pipelines > 0 and spec.swarm.chain_length > 1
