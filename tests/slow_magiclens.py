"""MagicLens in NumPy and float64, one item at a time, on the arrays as the released file holds them: an oracle for the PyTorch port."""
import numpy as np
from PIL import Image
from slow_clip import softmax

MEAN, STD = np.array([.48145466, .4578275, .40821073]), np.array([.26862954, .26130258, .27577711])


def doubles(tree): return {k: doubles(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)

def norm(x, p, eps=1e-5, offset=0.):
    x = x - x.mean(-1, keepdims=True)
    return x/np.sqrt((x*x).mean(-1, keepdims=True) + eps)*(offset + p["scale"]) + p["bias"]

def dense(x, p): return x @ p["kernel"] + p.get("bias", 0.)


def clip_blocks(x, tree, seen):  # (l, w)
    "Scenic's residual attention blocks."
    for n in range(len(tree)):
        p = tree[f"resblocks_{n}"]
        y, a = norm(x, p["ln_1"]), p["attn"]
        q, k, v = (np.einsum("lw,whd->lhd", y, a[name]["kernel"]) + a[name]["bias"] for name in ("query", "key", "value"))
        weights = np.stack([softmax(np.where(seen, q[:, h] @ k[:, h].T/np.sqrt(q.shape[2]), -1e30)) for h in range(q.shape[1])])
        x = x + np.einsum("hlm,mhd,hdw->lw", weights, v, a["out"]["kernel"]) + a["out"]["bias"]
        y = dense(norm(x, p["ln_2"]), p["mlp"]["c_fc"])
        x = x + dense(y/(1 + np.exp(-1.702*y)), p["mlp"]["c_proj"])
    return x

def clip_text(tree, ids):
    "Padded with 0 to the full length; 0 is never attended to."
    ids = np.concatenate([ids, np.zeros(len(tree["positional_embedding"]) - len(ids), int)])
    x = tree["token_embedding"]["embedding"][ids] + tree["positional_embedding"]
    x = clip_blocks(x, tree["transformer"], np.tri(len(ids), dtype=bool) & (ids > 0))
    return dense(norm(x, tree["ln_final"])[ids.argmax()], tree["text_projection"])

def clip_image(tree, image):  # (size, size, 3)
    kernel = tree["conv1"]["kernel"]
    p = len(kernel)
    patches = [np.einsum("yxc,yxcw->w", image[y:y + p, x:x + p], kernel) for y in range(0, len(image), p) for x in range(0, len(image), p)]
    x = norm(np.stack([tree["class_embedding"], *patches]) + tree["positional_embedding"], tree["ln_pre"])
    x = clip_blocks(x, tree["transformer"], np.ones((len(x), len(x)), bool))
    return dense(norm(x[0], tree["ln_post"]), tree["proj"])


def triangle(n_in, n_out):  # (n_out, n_in)
    "Weights of a bilinear resize that does not alias: a triangle of the width of an output pixel."
    scale = n_in/n_out
    centre = (np.arange(n_out) + .5)*scale - .5
    w = np.maximum(1 - np.abs(centre[:, None] - np.arange(n_in))/max(scale, 1), 0)
    return w/w.sum(1, keepdims=True)

def read_image(path, size):
    image = np.asarray(Image.open(path).convert("RGB"), np.float64)
    image = image/(image.max() + 1e-12)
    return (np.einsum("yh,xw,hwc->yxc", triangle(image.shape[0], size), triangle(image.shape[1], size), image) - MEAN)/STD


def attend(x, y, p, scaled=False):  # (a, d), (b, d)
    q, k, v = (np.einsum("td,dnh->tnh", z, p[name]["w"]) + p[name]["b"] for z, name in ((x, "query"), (y, "key"), (y, "value")))
    factor = 1/np.sqrt(q.shape[2])
    if scaled: factor = factor*1.442695041*np.log1p(np.exp(p["per_dim_scale"]["per_dim_scale"]))
    weights = softmax(50*np.tanh(np.einsum("tnh,snh->nts", q*factor, k)/50))
    return np.einsum("nts,snh,dnh->td", weights, v, p["post"]["w"]) + p["post"]["b"]

def compose(tree, *vectors):
    "Sequence of vectors -> unit vector."
    x = np.stack(vectors)
    for n in range(len(tree["multimodal_encoder"])):
        p = tree["multimodal_encoder"][f"x_layers_{n}"]
        y = norm(x, p["layer_norm"], 1e-6, 1)
        x, f = x + attend(y, y, p["self_attention"]), p["ff_layer"]
        y = np.maximum(norm(x, f["layer_norm"], 1e-6, 1) @ f["ffn_layer1"]["linear"]["w"] + f["ffn_layer1"]["bias"]["b"], 0)
        x = x + y @ f["ffn_layer2"]["linear"]["w"] + f["ffn_layer2"]["bias"]["b"]
    pool = tree["contrastive_multimodal_pooler"]
    out = norm(attend(pool["pooling_attn_query"], x, pool["pool_attn"], scaled=True)[0], pool["pool_attn_ln"], 1e-6, 1)
    return out/np.sqrt((out*out).sum() + 1e-12)
