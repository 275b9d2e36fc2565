"""A small decoder-only transformer and its training step, for the demo and the bench.

Byte-level language model in Flax NNX: rotary positions, RMS norms, GELU blocks, no
biases, f32 master weights. The step is a plain function over trees so that it can be
jitted with the whole training state donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jdelta


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer; the defaults make 6.4 M parameters.

    Attributes:
        width: Features of the residual stream.
        layers: Number of blocks.
        heads: Attention heads; `width / heads` must be even.
        vocabulary: Number of tokens (256: bytes).
        compute_dtype: What activations and matmuls are computed in. The weights are
            f32 whatever it is.
    """

    width: int = 256
    layers: int = 8
    heads: int = 4
    vocabulary: int = 256
    compute_dtype: str = "float32"


DEMO = ModelConfig()
"""6.4 M parameters: 13 MB of bf16 weights."""

BENCH = ModelConfig(width=512, layers=8, heads=8)
"""25.4 M parameters."""


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv:2104.09864) on f[batch, time, heads, features]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    sin, cos = jnp.sin(angle)[:, None, :], jnp.cos(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """Causal self-attention, then a GELU layer, both residual."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Make the weights (f32) with `rngs`."""
        self.heads = config.heads
        width, dtype = config.width, jnp.dtype(config.compute_dtype)
        # The outputs start small, so that the residual stream keeps its scale.
        small = nnx.initializers.variance_scaling(
            0.5 / config.layers, "fan_in", "normal"
        )

        def linear(features_in: int, features_out: int, **options: Any) -> nnx.Linear:
            return nnx.Linear(
                features_in,
                features_out,
                use_bias=False,
                dtype=dtype,
                rngs=rngs,
                **options,
            )

        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width, kernel_init=small)
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, kernel_init=small)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map f[batch, time, width] to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.reshape(batch, time, 3 * self.heads, width // self.heads)
        q, k, v = jnp.split(qkv, 3, axis=2)
        mixed = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        x = x + self.out(mixed.reshape(batch, time, width))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Token numbers in, logits of the next token out."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Make the weights (f32) with `rngs`."""
        dtype = jnp.dtype(config.compute_dtype)
        self.embed = nnx.Embed(config.vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.width, config.vocabulary, use_bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map i[batch, time] to f[batch, time, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(config: ModelConfig, seed: int = 0) -> tuple[Any, Any]:
    """Make a transformer and take it apart.

    Returns:
        `(graphdef, params)`: the static part, and the tree of f32 weights.
    """
    model = Transformer(config, rngs=nnx.Rngs(seed))
    return nnx.split(model, nnx.Param)


def abstract_params(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Any:
    """The tree of weights as `jax.ShapeDtypeStruct`s of `dtype`; computes nothing."""
    params = jax.eval_shape(lambda: make_model(config)[1])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)


def cast(params: Any, dtype: Any = jnp.bfloat16) -> Any:
    """The tree in `dtype`: what `jdelta.wrap` publishes by default."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def parameter_count(params: Any) -> int:
    """Number of elements of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def loss(graphdef: Any, params: Any, tokens: jax.typing.ArrayLike) -> jax.Array:
    """Mean cross entropy (nats a token) of u8/i32[batch, time + 1] under `params`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    logits = nnx.merge(graphdef, params)(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


Step = Callable[[Any, Any, jax.typing.ArrayLike], tuple[Any, ...]]


def make_step(
    graphdef: Any,
    tx: optax.GradientTransformation,
    *,
    stream: bool = False,
    capacity: float = 0.1,
) -> Step:
    """Make one jitted training step, with the training state donated.

    Args:
        graphdef: From `make_model`.
        tx: The optimizer; with `stream`, one that `jdelta.wrap` has wrapped.
        stream: Whether the step also extracts what changed.
        capacity: Room of the delta, as a share of the elements.

    Returns:
        `step(params, opt_state, tokens) -> (params, opt_state, loss)`, with the
        `jdelta.Delta` as a fourth result when `stream`. Collective: no.
    """

    def step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, ...]:
        value, grads = jax.value_and_grad(lambda p: loss(graphdef, p, tokens))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if not stream:
            return params, opt_state, value
        delta, opt_state = jdelta.extract(opt_state, params, capacity=capacity)
        return params, opt_state, value, delta

    return jax.jit(step, donate_argnums=(0, 1))
