"""CLIP's forward in NumPy and float64, one sequence at a time, written from the papers: an oracle for the adapters."""
import numpy as np


def layer_norm(x, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred/np.sqrt((centred**2).mean(-1, keepdims=True) + eps)*weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e/e.sum(-1, keepdims=True)


def transformer(x, state, prefix, layers, heads, seen):  # (l, w), seen: (l, l) bool -> (l, w)
    "Pre-norm layers with the quick GELU."
    def linear(v, name): return v @ state[f"{name}.weight"].T + state[f"{name}.bias"]
    size = x.shape[1]//heads
    for n in range(layers):
        p = f"{prefix}.encoder.layers.{n}."
        y = layer_norm(x, state[p + "layer_norm1.weight"], state[p + "layer_norm1.bias"])
        q, k, v = (linear(y, p + f"self_attn.{name}_proj") for name in "qkv")
        mixed = []
        for h in range(heads):
            part = slice(h*size, (h + 1)*size)
            logits = np.where(seen, q[:, part] @ k[:, part].T/np.sqrt(size), -np.inf)
            mixed.append(softmax(logits) @ v[:, part])
        x = x + linear(np.concatenate(mixed, 1), p + "self_attn.out_proj")
        y = linear(layer_norm(x, state[p + "layer_norm2.weight"], state[p + "layer_norm2.bias"]), p + "mlp.fc1")
        x = x + linear(y/(1 + np.exp(-1.702*y)), p + "mlp.fc2")
    return x


def text_vector(state, ids, layers, heads, words=None):  # words: position -> embedding that stands in for the token's
    "The projected vector at the largest token number."
    ids, words = np.asarray(ids), words or {}
    x = np.stack([words.get(n, state["text_model.embeddings.token_embedding.weight"][i]) for n, i in enumerate(ids)])
    x = x + state["text_model.embeddings.position_embedding.weight"][:len(ids)]
    x = transformer(x, state, "text_model", layers, heads, np.tri(len(ids), dtype=bool))
    x = layer_norm(x, state["text_model.final_layer_norm.weight"], state["text_model.final_layer_norm.bias"])
    return x[ids.argmax()] @ state["text_projection.weight"].T


def image_vector(state, pixels, layers, heads):  # pixels (3, h, w), normalised
    "The projected vector at the class token."
    kernel = state["vision_model.embeddings.patch_embedding.weight"]
    p = kernel.shape[-1]
    patches = [pixels[:, y:y + p, x:x + p] for y in range(0, pixels.shape[1], p) for x in range(0, pixels.shape[2], p)]
    x = np.stack([state["vision_model.embeddings.class_embedding"], *((kernel*patch).sum((1, 2, 3)) for patch in patches)])
    x = x + state["vision_model.embeddings.position_embedding.weight"]
    x = layer_norm(x, state["vision_model.pre_layrnorm.weight"], state["vision_model.pre_layrnorm.bias"])
    x = transformer(x, state, "vision_model", layers, heads, np.ones((len(x), len(x)), bool))
    x = layer_norm(x[0], state["vision_model.post_layernorm.weight"], state["vision_model.post_layernorm.bias"])
    return x @ state["visual_projection.weight"].T
