# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The anatomy of a delta
#
# A small transformer trains on real text for some seconds, then is fine-tuned with a
# small learning rate while every step is published. What does a published delta look
# like inside, and which weights does a step change?
#
# Needs `pip install 'jdelta[jax,plot]'`.

# %%
import json
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from safetensors import safe_open

import jdelta
from jdelta.wire import bits

# %% [markdown]
# ## A model
#
# Byte-level, decoder-only, four layers. The master weights are f32; readers will hold
# bf16.

# %%
WIDTH, LAYERS, TIME = 128, 4, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.place = nnx.Embed(TIME, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")

# %% [markdown]
# The text is what every Python has: the sources of its standard library.

# %%
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"\n".join(path.read_bytes() for path in sources), np.uint8)
rng = np.random.default_rng(0)


def batch(size=16):
    starts = rng.integers(0, text.size - TIME, size)
    return text[starts[:, None] + np.arange(TIME + 1)].astype(np.int32)


def loss(params, tokens):
    logits = nnx.merge(graph, params)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


# %% [markdown]
# ## Pretrain for some seconds
#
# Weights right after initialization are not like a trained model's.

# %%
tx = optax.adamw(1e-3)


@partial(jax.jit, donate_argnums=(0, 1))
def pretrain(params, opt_state, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


opt_state = tx.init(params)
end = time.monotonic() + 15
while time.monotonic() < end:
    params, opt_state, value = pretrain(params, opt_state, batch())
    value.block_until_ready()
print(f"loss {value:.2f} nats a byte")

# %% [markdown]
# ## Fine-tune, and publish every step

# %%
STEPS = 24
tx = jdelta.wrap(optax.adamw(3e-6))


@partial(jax.jit, donate_argnums=(0, 1))
def train(params, opt_state, tokens):
    grads = jax.grad(loss)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    delta, opt_state = jdelta.extract(opt_state, params, capacity=0.5)
    return params, opt_state, delta


folder = tempfile.TemporaryDirectory()
bucket = Path(folder.name)
opt_state = tx.init(params)
with jdelta.Publisher(str(bucket), jdelta.published(opt_state, params)) as pub:
    for step in range(1, STEPS + 1):
        params, opt_state, delta = train(params, opt_state, batch())
        pub.publish(
            delta, step=step, params=partial(jdelta.published, opt_state, params)
        )
        pub.flush()  # so that each step is a version of its own here

# %% [markdown]
# ## Open a delta
#
# A version that is a delta is one safetensors file: a run of bytes for each tensor that
# changed, and a note on what it is.

# %%
path = max(bucket.glob("deltas/*/*.safetensors"))
with safe_open(path, framework="numpy") as file:
    note = json.loads(file.metadata()["jdelta"])
    stored = {name: file.get_tensor(name).nbytes for name in file.keys()}
changed = note.pop("changed")
print(f"{path.relative_to(bucket)}: {path.stat().st_size:,} bytes")
print(note)
print(f"\n{'tensor':44} {'changed':>8} {'bytes':>7} {'bits each':>9}")
for name in list(stored)[:12]:
    each = 8 * stored[name] / changed[name]
    print(f"{name:44} {changed[name]:8,} {stored[name]:7,} {each:9.1f}")
print(f"... and {len(stored) - 12} more" if len(stored) > 12 else "")
total = sum(changed.values())
print(f"{'all':44} {total:8,} {sum(stored.values()):7,} ", end="")
print(f"{8 * sum(stored.values()) / total:9.1f}")

# %% [markdown]
# Against the whole weights in bf16:

# %%
whole, manifest = jdelta.load(str(bucket))
full = sum(array.nbytes for array in whole.values())
elements = sum(array.size for array in whole.values())
print(f"{elements:,} weights, {full:,} bytes whole")
print(f"{total / elements:.2%} of the weights changed")
print(f"the delta takes {path.stat().st_size / full:.2%} of the whole weights' bytes")

# %% [markdown]
# ## Which weights change?
#
# Follow the run with the NumPy subscriber and count, per tensor and per exponent.

# %%
touched = {name: 0 for name in whole}
by_exponent = np.zeros((2, 256))  # changed weights, all weights
sizes: dict[int, int] = {}  # how far the changes go, in steps of bf16
with jdelta.Subscriber(str(bucket)) as sub:
    weights = sub.restore(0)
    for update in sub.updates(every=True):
        for name in update.specs:
            exponents = weights[name].reshape(-1).view(np.uint16) >> 7 & 0xFF
            by_exponent[1] += np.bincount(exponents, minlength=256)
            if name in update.patch:
                moved = update.patch[name]
                at = exponents[moved.positions]
                by_exponent[0] += np.bincount(at, minlength=256)
                touched[name] += len(moved.positions)
                far, count = np.unique(moved.steps.view(np.int16), return_counts=True)
                for size, times in zip(abs(far.astype(int)), count, strict=True):
                    sizes[size] = sizes.get(size, 0) + int(times)
        weights = update.apply(weights)
        if update.version == manifest.version:
            break
assert all(
    np.array_equal(bits.to_bits(weights[n]), bits.to_bits(whole[n])) for n in whole
)
print(f"followed to version {manifest.version}: equal bit for bit")

# %% [markdown]
# ### Per layer

# %%
parts = {
    name: name.split(".")[1] if name.startswith("blocks.") else name.split(".")[0]
    for name in whole
}
layers = list(dict.fromkeys(parts.values()))
kinds = {"matrices": lambda a: a.ndim > 1, "vectors": lambda a: a.ndim <= 1}
figure, axes = plt.subplots(figsize=(7, 3))
for shift, (kind, belongs) in zip((-0.2, 0.2), kinds.items(), strict=True):
    density = []
    for layer in layers:
        names = [n for n in whole if parts[n] == layer and belongs(whole[n])]
        size = sum(whole[n].size for n in names) * manifest.version
        density.append(100 * sum(touched[n] for n in names) / size if size else 0)
    axes.bar(np.arange(len(layers)) + shift, density, 0.4, label=kind)
labels = [f"block {layer}" if layer.isdigit() else layer for layer in layers]
axes.set_xticks(range(len(layers)), labels, rotation=30)
axes.set_ylabel("changed, % a step")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ### Per exponent
#
# AdamW moves every weight by about the learning rate. A bf16 weight has 8 significant
# bits, so a large weight seldom crosses into the next value, a small one often.

# %%
there = by_exponent[1] > 0.0005 * by_exponent[1].sum()
exponent = np.arange(256)[there] - 127
figure, axes = plt.subplots(figsize=(7, 3))
axes.bar(exponent, 100 * by_exponent[0, there] / by_exponent[1, there])
axes.set_yscale("log")
axes.set_xlabel("exponent of the old weight: $2^x \\leq |w| < 2^{x+1}$")
axes.set_ylabel("changed, % a step")
share = axes.twinx()
share.plot(exponent, 100 * by_exponent[1, there] / by_exponent[1].sum(), "k.-")
share.set_ylabel("of all weights, %")
figure.tight_layout()
plt.show()

# %% [markdown]
# And a change is mostly a step to the neighbouring value, which is why positions take
# most of the bytes.

# %%
every = sum(sizes.values())
for size in sorted(sizes)[:4]:
    print(f"{size} step{'s' if size > 1 else ' '}: {sizes[size] / every:.2%}")
folder.cleanup()
