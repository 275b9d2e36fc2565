"""Stream the weights of an ordinary Optax loop, and follow them bit for bit."""

import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdelta

inputs = jax.random.normal(jax.random.key(0), (256, 32))
targets = jnp.sin(inputs.sum(axis=1))
params = {
    "hidden": jax.random.normal(jax.random.key(1), (32, 512)) / 6,
    "out": jax.random.normal(jax.random.key(2), (512,)) / 23,
}
tx = jdelta.wrap(optax.adamw(1e-5))  # readers will hold the weights in bf16
opt_state = tx.init(params)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state):
    def loss(p):
        return jnp.mean((jnp.tanh(inputs @ p["hidden"]) @ p["out"] - targets) ** 2)

    updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
    params = optax.apply_updates(params, updates)
    delta, opt_state = jdelta.extract(opt_state, params, capacity=0.5)
    return params, opt_state, delta


with tempfile.TemporaryDirectory() as bucket:
    with jdelta.Publisher(bucket, jdelta.published(opt_state, params)) as pub:
        sub = jdelta.Subscriber(bucket)  # usually in another process
        weights = sub.restore()
        for step in range(1, 21):
            params, opt_state, delta = train_step(params, opt_state)
            pub.publish(
                delta, step=step, params=partial(jdelta.published, opt_state, params)
            )
        pub.flush()
        for update in sub.updates():
            weights = update.apply(weights)
            if update.version == pub.version:
                break
    sub.close()

for name, master in params.items():
    theirs = weights[name].view(np.uint16)
    mine = np.asarray(master.astype(jnp.bfloat16)).view(np.uint16)
    print(name, "equal" if np.array_equal(mine, theirs) else "DIFFERENT")
