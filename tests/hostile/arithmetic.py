"""The arithmetic of docs/protocol/training.md and pipeline.md, from these pages alone.

It imports nothing of hetnode, and computes with numpy and in float64 where the pages leave the accuracy free.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

F32 = np.float32
Tensors = dict[str, np.ndarray]
Fields = Mapping[str, Any]


def model_of(fields: Fields) -> dict[str, Any]:
    """All fields of the section `model` that the arithmetic needs."""
    defaults = {
        "rope_base": 10000.0,
        "norm_epsilon": 1e-5,
        "qkv_bias": False,
        "qk_norm": False,
        "norms": "inputs",
        "tied_head": False,
        "rope_scaling": "none",
        "rope_factor": 1.0,
        "rope_low_frequency": 1.0,
        "rope_high_frequency": 4.0,
        "rope_context": 8192,
        "key_value_heads": fields["heads"],
        "head_width": fields["width"] // fields["heads"],
    }
    return {**defaults, **fields}


# Section 2: parameters


def shapes_of(fields: Fields, stages: int, stage: int) -> dict[str, tuple[int, ...]]:
    m = model_of(fields)
    d, f, v, e = m["width"], m["feed_forward"], m["vocabulary"], m["head_width"]
    q, k = m["heads"] * e, m["key_value_heads"] * e
    size, more = divmod(m["layers"], stages)
    first = stage * size + min(stage, more)
    shapes: dict[str, tuple[int, ...]] = {"emb": (v, d)} if stage == 0 else {}
    for n in range(first, first + size + (stage < more)):
        layer: dict[str, tuple[int, ...]] = {"norm1": (d,), "wq": (q, d), "wk": (k, d), "wv": (k, d)}
        layer |= {"bq": (q,), "bk": (k,), "bv": (k,)} if m["qkv_bias"] else {}
        layer |= {"norm_q": (e,), "norm_k": (e,)} if m["qk_norm"] else {}
        layer |= {"norm_q": (q,), "norm_k": (k,)} if m["norms"] == "outputs" else {}
        layer |= {"wo": (d, q), "norm2": (d,), "w_gate": (f, d), "w_up": (f, d), "w_down": (d, f)}
        shapes |= {f"{n}.{name}": shape for name, shape in layer.items()}
    head = {} if m["tied_head"] else {"head": (v, d)}
    return shapes | ({"norm_f": (d,)} | head if stage == stages - 1 else {})


def initial(fields: Fields, stages: int, stage: int, seed: int) -> Tensors:
    found = {}
    for index, (name, shape) in enumerate(shapes_of(fields, stages, stage).items()):
        kind = name.rpartition(".")[2]
        if len(shape) == 1:
            found[name] = np.full(shape, 0.0 if kind in ("bq", "bk", "bv") else 1.0, F32)
            continue
        count = math.prod(shape)
        key = np.array([seed, (stage << 32) + index], np.uint64)
        outputs = np.random.Philox(key=key).random_raw((count + 1) // 2)
        words = np.stack([outputs & 0xFFFFFFFF, outputs >> 32], axis=1).ravel()[:count].astype(np.int64)
        std = 0.02 / math.sqrt(2 * fields["layers"]) if kind in ("wo", "w_down") else 0.02
        odd = 2 * (words >> 8) + 1 - (1 << 24)
        found[name] = (odd.astype(F32) * F32(std * math.sqrt(3) * 2.0**-24)).reshape(shape)
    return found


# Section 3: the forward pass


def _rms(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
    return scaled


def _rope(x_hle: np.ndarray, m: Fields) -> np.ndarray:
    e, length = x_hle.shape[-1], x_hle.shape[1]
    w = m["rope_base"] ** (-2.0 * np.arange(e // 2) / e)
    if m["rope_scaling"] == "linear":
        w = w / m["rope_factor"]
    elif m["rope_scaling"] == "llama3":
        low, high = m["rope_low_frequency"], m["rope_high_frequency"]
        c = np.clip((w * m["rope_context"] / (2 * math.pi) - low) / (high - low), 0, 1)
        w = c * w + (1 - c) * w / m["rope_factor"]
    angle = np.arange(length)[:, None] * w
    x, y = x_hle[..., : e // 2], x_hle[..., e // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((x * cos - y * sin, y * cos + x * sin), axis=-1)


def logits_of(p: Tensors, fields: Fields, ids: Sequence[int], separator: int | None = None) -> np.ndarray:
    """Logits [L, V] of one sample; with a separator of one whose documents are apart."""
    m = model_of(fields)
    eps, e, length = m["norm_epsilon"], m["head_width"], len(ids)
    x = p["emb"][list(ids)]
    mask = np.triu(np.full((length, length), -np.inf), 1)
    for at, number in enumerate(ids):
        if number == separator:
            mask[at:, :at] = -np.inf
    for n in range(m["layers"]):
        w = {name.partition(".")[2]: value for name, value in p.items() if name.startswith(f"{n}.")}
        after = m["norms"] == "outputs"
        normed = x if after else _rms(x, w["norm1"], eps)

        def heads(kind: str, normed: np.ndarray = normed, w: Tensors = w, after: bool = after) -> np.ndarray:
            y = normed @ w[f"w{kind}"].T + w.get(f"b{kind}", 0.0)
            y = _rms(y, w[f"norm_{kind}"], eps) if after and kind != "v" else y
            return y.reshape(length, -1, e).swapaxes(0, 1)

        q, k, v = heads("q"), heads("k"), heads("v")
        if m["qk_norm"]:
            q, k = _rms(q, w["norm_q"], eps), _rms(k, w["norm_k"], eps)
        share = m["heads"] // m["key_value_heads"]
        if m["rope_scaling"] != "smollm3" or n % 4 < 3:
            q, k = _rope(q, m), _rope(k, m)
        k, v = np.repeat(k, share, 0), np.repeat(v, share, 0)
        scores = q @ k.swapaxes(1, 2) / math.sqrt(e) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        y = mixed.swapaxes(0, 1).reshape(length, -1) @ w["wo"].T
        x = x + (_rms(y, w["norm1"], eps) if after else y)
        normed = x if after else _rms(x, w["norm2"], eps)
        gate = normed @ w["w_gate"].T
        y = (gate / (1 + np.exp(-gate)) * (normed @ w["w_up"].T)) @ w["w_down"].T
        x = x + (_rms(y, w["norm2"], eps) if after else y)
    logits: np.ndarray = _rms(x, p["norm_f"], eps) @ p.get("head", p["emb"]).T
    return logits


def loss_of(logits: np.ndarray, targets: Sequence[int]) -> float:
    largest = logits.max(-1)
    total = np.log(np.exp(logits - largest[:, None]).sum(-1)) + largest
    return float((total - logits[np.arange(len(targets)), list(targets)]).mean())


# Section 4: samples


def _blake(text: str, key: str = "") -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), key=key.encode(), digest_size=8).digest(), "little")


def window_of(ordinal: int, size: int, seed: int) -> tuple[int, int]:
    """Pass and window."""
    turn, i = divmod(ordinal, size)
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(i, side)
        for each in range(4):
            left, right = right, (left + _blake(f"{each}/{right}", f"{seed}/{turn}")) % side
        if (i := left * side + right) < size:
            return turn, i


def turns_of(nbytes: Sequence[int], seed: int, number: int) -> list[tuple[int, int]]:
    """Shard and turn, in the order of a pass."""
    c, found = max(2**26, math.ceil(sum(nbytes) / 2**16)), []
    for s, size in enumerate(nbytes):
        u, f = max(1, math.ceil(size / c)), _blake(f"{s}", f"{seed}/{number}")
        found += [((2**64 * r + f) // u, s, r) for r in range(u)]
    return [(s, r) for _, s, r in sorted(found)]


def place_in(i: int, weights: Sequence[int], seed: int) -> tuple[int, int]:
    """The source at position i of a mixture, and which of its samples."""
    number, at = divmod(i, sum(weights))
    found = []
    for s, w in enumerate(weights):
        found += [((2**64 * r + _blake(f"{s}", f"{seed}/{number}")) // w, s, r) for r in range(w)]
    _, s, r = sorted(found)[at]
    return s, weights[s] * number + r


def sample_of(n: int, source: Any, past: Sequence[Fields], seed: int) -> tuple[str, int]:
    """The source of sample n of a run, and which of its samples."""
    i, before = n - sum(each["samples"] for each in past), []
    for phase in past:
        found, each = phase["source"], phase["samples"]
        found = [{"source": found}] if isinstance(found, str) else found
        before += [found[place_in(j, _weights(found), seed)[0]]["source"] for j in range(each)]
    s, ordinal = place_in(i, _weights(source), seed)
    return source[s]["source"], before.count(source[s]["source"]) + ordinal


def _weights(sources: Sequence[Fields]) -> list[int]:
    return [each.get("weight", 1) for each in sources]


def is_held_out(ordinal: int, one_in: int, shard: str = "") -> bool:
    q, r = divmod(ordinal, one_in)
    return r == (1 if q == 0 and not shard else _blake(f"{shard}{q}") % one_in)


def blocks_of(text: str) -> list[str]:
    """The documents of a source text: with one file."""
    size, found = min(max(len(text) // 32, 1024), 65536), []
    while text:
        stop = size
        if len(text) > size:
            stop = text.rfind("\n", 0, size) + 1 or size
        found.append(text[:stop])
        text = text[stop:]
    return found


def windows_of(documents: Sequence[str], context: int) -> list[bytes]:
    """The windows of one split with the tokenizer byte."""
    tokens = b"".join(each.encode(errors="replace") + b"\n" for each in documents)
    return [tokens[w * context : w * context + context + 1] for w in range((len(tokens) - 1) // context)]


# Section 5: an inner step


def rate_of(inner: Fields, step: int, total: int) -> float:
    warmup, ratio = inner["warmup_steps"], inner["final_ratio"]
    if step < warmup:
        return float(inner["learning_rate"] * (step + 1) / warmup)
    p = min(1.0, (step - warmup) / max(1, total - warmup))
    return float(inner["learning_rate"] * (ratio + (1 - ratio) * (1 + math.cos(math.pi * p)) / 2))


def adamw(
    values: Tensors, gradients: Tensors, moments: dict[str, Any], count: int, rate: float, inner: Fields
) -> None:
    """Step number `count` (from 1), in place."""
    b1, b2 = inner["beta1"], inner["beta2"]
    for name, g in gradients.items():
        first, second = moments.get(name, (0.0, 0.0))
        moments[name] = first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g * g
        if g.ndim == 2 and name != "emb":
            values[name] = values[name] * (1 - rate * inner["weight_decay"])
        spread = np.sqrt(second / (1 - b2**count)) + inner["epsilon"]
        values[name] = values[name] - rate * first / (1 - b1**count) / spread


# Section 6: payloads

Sent = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of one tensor: indices, values, codes, magnitudes (empty for float32 values)."""


def codec_of(outer: Fields) -> str:
    if not outer["top_k"]:
        return "dense32-v1"
    index = {"elias-fano": "ef", "enumerative": "en"}[outer.get("indices", "elias-fano")]
    values = {"none": "32"}.get(outer.get("quantizer", "2bit"), outer.get("quantizer", "2bit"))
    return f"{index}{values}-v1:{outer['chunk']}/{outer['top_k']}"


def header_of(shapes: Mapping[str, Sequence[int]], outer: Fields) -> bytes:
    text = json.dumps([codec_of(outer), [[name, list(shape)] for name, shape in shapes.items()]])
    return b"hnpg" + struct.pack("<I", 1) + hashlib.sha256(text.encode()).digest()[:8]


def _bits(data: bytes) -> list[int]:
    return [byte >> bit & 1 for byte in data for bit in range(8)]


def _number(bits: Sequence[int]) -> int:
    return sum(bit << place for place, bit in enumerate(bits))


def _positions(data: bytes, n: int, k: int, chunks: int, code: str) -> tuple[list[list[int]], int]:
    """The positions in each of some chunks of n elements, and the bytes that they take."""
    found: list[list[int]] = []
    if code == "enumerative":
        width = (math.comb(n, k) - 1).bit_length()
        used = -(-chunks * width // 8)
        bits = _bits(data[:used])
        for chunk in range(chunks):
            rank, positions = _number(bits[chunk * width : (chunk + 1) * width]), []
            for i in reversed(range(k)):
                x = max(x for x in range(n) if math.comb(x, i + 1) <= rank)
                rank -= math.comb(x, i + 1)
                positions.insert(0, x)
            found.append(positions)
        return found, used
    low = min(range(n.bit_length()), key=lambda bits: k * bits + (n - 1 >> bits))
    length = -(-(k * low + k + (n - 1 >> low)) // 8)
    for chunk in range(chunks):
        bits = _bits(data[chunk * length : (chunk + 1) * length])
        ones = [place for place, bit in enumerate(bits[k * low :]) if bit]
        found.append(
            [(one - i << low) + _number(bits[i * low : (i + 1) * low]) for i, one in enumerate(ones)]
        )
    return found, chunks * length


def decode(shapes: Mapping[str, Sequence[int]], outer: Fields, payload: bytes) -> dict[str, Sent]:
    """What a receiver sees of a valid payload."""
    header, found = header_of(shapes, outer), {}
    assert payload.startswith(header), "another header"
    data = payload[len(header) :]
    count = {"2bit": 2, "1bit": 1, "none": 0}[outer.get("quantizer", "2bit") if outer["top_k"] else "none"]
    for name, shape in shapes.items():
        numel, chunk, top_k = math.prod(shape), outer["chunk"], outer["top_k"]
        magnitudes, data = np.frombuffer(data[: 4 * count], "<f4"), data[4 * count :]
        full, rest = divmod(numel, chunk)
        indices: list[int] = [] if top_k else list(range(numel))
        for n, chunks, start in ((chunk, full, 0), (rest, 1, full * chunk)):
            if not top_k or not n or not chunks:
                continue
            k = max(1, (2 * top_k * n + chunk) // (2 * chunk))
            places, used = _positions(data, n, k, chunks, outer.get("indices", "elias-fano"))
            data = data[used:]
            for number, each in enumerate(places):
                assert all(a < b < n for a, b in pairwise([-1, *each])), "positions do not ascend"
                indices += [start + number * n + x for x in each]
        if count:
            nbytes = -(-len(indices) * count // 8)
            bits = _bits(data[:nbytes])
            codes = np.array([_number(bits[i * count : (i + 1) * count]) for i in range(len(indices))])
            values = np.where(codes < count, 1, -1).astype(F32) * magnitudes[codes % count]
        else:
            nbytes = 4 * len(indices)
            codes, values = np.zeros(0), np.frombuffer(data[:nbytes], "<f4")
        data = data[nbytes:]
        found[name] = np.array(indices), values, codes, magnitudes
    assert not data, "the payload is too long"
    return found


# Section 7: digests


def digest_of(tensors: Tensors) -> str:
    names = sorted(tensors)
    listed = [[name, list(tensors[name].shape)] for name in names]
    header = json.dumps({"dtype": "f32", "tensors": listed}, separators=(",", ":"))
    data = b"".join(tensors[name].astype("<f4").tobytes() for name in names)
    chunks = (data[start : start + (4 << 20)] for start in range(0, len(data), 4 << 20))
    hashes = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    return hashlib.sha256(header.encode() + b"\n" + hashes).hexdigest()


# Section 8: the outer step


def norm_of(payload: Mapping[str, Sent]) -> float:
    return math.sqrt(math.fsum(map(squares_of, payload.values())))


def squares_of(sent: Sent) -> float:
    _, values, codes, magnitudes = sent
    count = len(magnitudes)
    if count:
        return folded([float((codes % count == j).sum()) * float(magnitudes[j]) ** 2 for j in range(count)])
    return folded([float(value) ** 2 for value in values])


def folded(parts: list[float]) -> float:
    while len(parts) > 1:
        half = (len(parts) + 1) // 2
        parts = [a + b for a, b in zip(parts, [*parts[half:], 0.0], strict=False)][:half]
    return sum(parts)


def stretch_of(total: np.ndarray, sent: Sequence[Sent], factors: Sequence[float]) -> float:
    norms = [factor * math.sqrt(squares_of(each)) for factor, each in zip(factors, sent, strict=True)]
    starts = range(0, len(total), 524_288)
    t = math.fsum(folded([float(x) ** 2 for x in total[at : at + 524_288]]) for at in starts)
    length = math.sqrt(max(t, math.fsum(norm * norm for norm in norms)))
    return math.fsum(norms) / length if 0 < length < math.inf else 1.0


def scales_of(norms: Sequence[float], clip: float) -> list[float]:
    positive = sorted(norm for norm in norms if norm > 0)
    bound = (clip if len(positive) >= 3 else 8) * positive[(len(positive) - 1) // 2] if positive else 0.0
    scales = [bound / norm if norm > bound else 1.0 for norm in norms]
    return [scale if scale >= 2.0**-64 else 0.0 for scale in scales]


def outer_step(
    committed: Tensors, payloads: Sequence[Mapping[str, Sent]], weights: Sequence[float], outer: Fields
) -> Tensors:
    scales, found = scales_of([norm_of(each) for each in payloads], outer.get("clip", 8.0)), {}
    rate, mu = F32(outer["learning_rate"]), F32(outer.get("momentum", 0))
    factors = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
    for name, anchor in committed.items():
        if "/" in name:
            continue
        total = np.zeros(anchor.size, F32)
        for payload, factor in zip(payloads, factors, strict=True):
            indices, values, *_ = payload[name]
            total[indices] += values * F32(factor)
        divisor = math.fsum(weights)
        if outer.get("merge") == "radial" and len(payloads) > 1:
            divisor /= stretch_of(total, [payload[name] for payload in payloads], factors)
        g = (total / F32(divisor)).reshape(anchor.shape)
        if outer.get("optimizer") == "nesterov":
            v = committed[f"{name}/momentum"] * mu + g
            v[np.abs(v) < F32(2.0**-64)] = 0
            found[f"{name}/momentum"] = v
            g = v * mu + g
        found[name] = anchor - g * rate
    return found


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    def on_a_grid(matrix: np.ndarray) -> np.ndarray:
        step = 2.0 ** (math.frexp(np.abs(matrix).max())[1] - bits)
        rounded: np.ndarray = np.rint(matrix / step) * step
        return rounded

    bits = (53 - a.shape[1].bit_length()) // 2
    found: np.ndarray = on_a_grid(a) @ on_a_grid(b)
    return found


def span_of(width: int, k: int, seed: int) -> np.ndarray:
    gaussian = np.random.Generator(np.random.Philox(seed)).standard_normal((width, width))
    b = gaussian[:, :k] / (math.sqrt(width) + math.sqrt(k))
    for _ in range(30):
        b = product(b, (3 * np.eye(k) - product(b.T, b)) / 2)
    return b


def projected(weight: np.ndarray, b: np.ndarray) -> np.ndarray:
    return product(b, product(b.T, weight.astype(np.float64))).astype(F32)


# pipeline.md


def basis_of(width: int, seed: int) -> np.ndarray:
    gaussian = np.random.Generator(np.random.Philox(seed)).standard_normal((width, width))
    q, r = np.linalg.qr(gaussian)
    basis: np.ndarray = q * np.sign(np.diag(r))
    return basis


def unpacked(dtype: str, data: bytes, shape: Sequence[int], frame: Sequence[int]) -> np.ndarray:
    """The values of a tensor [b, L, k] in a frame; NaN where the sender had no finite ones."""
    tokens, k = math.prod(shape[:-1]), shape[-1]
    if dtype == "bf16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(F32).astype(float)
    n = {"dither5": 5, "dither3": 3}[dtype]
    length = -(-n * k // 8)
    scales, values = data[tokens * length :], []
    for token in range(tokens):
        bits = _bits(data[token * length : (token + 1) * length])
        step = {0: 0.0, 255: math.nan}.get(scales[token], 2.0 ** ((scales[token] - 192) / 4))
        for j in range(k):
            level = _number(bits[j * n : (j + 1) * n])
            values.append((level - 2 ** (n - 1) + 0.5 - _offset(token * k + j, frame)) * step)
    return np.array(values)


def shift_of(frame: Sequence[int]) -> int:
    y = 0x9E3779B9
    for number in frame:
        y = _mixed(y ^ number)
    return y >> 16


def _offset(place: int, frame: Sequence[int]) -> float:
    return float(((_mixed(place) >> 16) + shift_of(frame)) % 2**16 / 2**16 - 0.5 + 2**-17)


def _mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
