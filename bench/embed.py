"""The engine against a plain loop over the same model, against sentence-transformers, and three modalities against one.

    python bench/embed.py                       # all cases, about twelve minutes on two cores
    python bench/embed.py mixed equal           # some of them
    python bench/embed.py --rounds 11 --items 300 --workers 2

Models have the architecture of real ones and random weights: throughput does not depend on their values.

    mixed    Qwen2-VL, photographs of many sizes and texts of 3 to 40 words: engine, plain loop, sentence-transformers
    equal    the same with one size and one length
    three    CLIP of the shape of ViT-B/32: composed, text-only and image-only vectors of queries, against composed alone
    mllm     Qwen2-VL: the same three, whose vision features are shared

Versions take turns: in every round each runs once, from files to vectors, the first one changing from round to round. A ratio
is the median over the rounds, with its range; on a busy machine the ratio of CPU seconds says more. The plain loop and sentence-transformers (if it is installed: pip install
sentence-transformers) run with batches of 32, its default, of 16, and with the size out of 1, 4, 8 that suits them best here. It gets the images as file names, or opened by PIL and not yet decoded: then it can sort them by size. All give the
same vectors to 1e-4, which is checked. The engine's time includes hashes of the images and a store that is written and read,
but not its check of the model at the start: 14 items through the model, whatever their number, which is timed apart.
"""
import argparse, os, sys, tempfile, time
from dataclasses import replace
from pathlib import Path
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests"))   # tiny_models: real architectures out of a configuration
PATCH, WIDTH = 14, 320                                                 # pixels of a patch, width of the language model


def photographs(folder, n, sizes, rng):
    "JPEG files that take as long to decode as photographs do."
    from cirkit.io import write_image
    paths = []
    for i in range(n):
        h, w = sizes[i % len(sizes)]
        coarse = rng.integers(0, 255, (h//16 + 2, w//16 + 2, 3)).astype(np.float32).repeat(16, 0).repeat(16, 1)[:h, :w]
        image = np.clip(coarse + rng.normal(0, 12, (h, w, 3)), 0, 255).astype(np.uint8)
        paths.append(folder/f"{n}-{i}.jpg"); write_image(paths[-1], image)
    return paths


def items(folder, n, mixed, seed=0):
    "Queries with one image and a text."
    from cirkit.embed.protocol import Item
    rng = np.random.default_rng(seed)
    sizes = [tuple(int(s) for s in rng.integers(60, 400, 2)) for _ in range(n)] if mixed else [(224, 224)]
    lengths = rng.integers(3, 41, n) if mixed else np.full(n, 12)
    words = np.array("the same dog in red but two more of them on a beach at night seen from above".split())
    return [Item(f"q{i}", (p,), " ".join(rng.choice(words, k)) if mixed else "the dog in red, two more of them " + f"{i:06d}")
            for i, (p, k) in enumerate(zip(photographs(folder, n, sizes, rng), lengths))]


def qwen(folder, item):
    "Qwen2-VL of some eight million weights in the proportions of the 7B one, as the hub has it, readable by both libraries."
    import torch, transformers
    import tiny_models
    from cirkit.embed.mllm import load
    tok = tiny_models.tokenizer("qwen")
    tok.padding_side = "left"
    rope = {"rope_type": "default", "rope_theta": 10000., "mrope_section": [16, 12, 12]}
    text = tiny_models.text_config(tok, layers=4, rope_parameters=rope) | dict(hidden_size=WIDTH, intermediate_size=3*WIDTH)
    vision = dict(depth=3, embed_dim=128, hidden_size=WIDTH, num_heads=4, patch_size=PATCH, mlp_ratio=4)
    pixels = transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, size={"shortest_edge": 4*(2*PATCH)**2, "longest_edge": 512*(2*PATCH)**2})
    torch.manual_seed(0)
    transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tiny_models.qwen_ids(tok))).save_pretrained(folder)
    for part in (tok, pixels): part.save_pretrained(folder)
    return load("bench", folder, template="vlm2vec-v2-circus", pooling="last position", image_tokens=(4, 512, 2*PATCH), max_length=4096)


def sentence(folder, ours, item):
    "The same files in sentence-transformers; None without it."
    try: from sentence_transformers import SentenceTransformer
    except ImportError: return None
    import transformers
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    words = ours.preparer.describe(item, "query")["text"]
    mark = "<|image_pad|>"
    parts = {"image": words.index(mark), "text": words.index(item.text)}
    assert parts["image"] < parts["text"]
    first, between, last = words[:parts["image"]], words[parts["image"] + len(mark):parts["text"]], words[parts["text"] + len(item.text):]
    template = ("{% for m in messages %}{{ " + repr(first + mark + between) + " }}{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
                "{{ " + repr(last) + " }}{% endfor %}")

    class WithoutVideo(transformers.Qwen2VLProcessor):     # the video part needs torchvision, and nothing here needs it
        def __init__(self): self.tokenizer, self.image_processor, self.chat_template = ours.preparer.tokenizer, ours.preparer.processor, template
        get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
    processor = WithoutVideo()
    processor.image_token, processor.video_token = mark, "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = ours.preparer.tokenizer.convert_tokens_to_ids([mark, "<|video_pad|>"])
    find, transformers.AutoProcessor.from_pretrained = transformers.AutoProcessor.from_pretrained, lambda *a, **k: processor
    try: return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(WIDTH, pooling_mode="lasttoken")], device="cpu")
    finally: transformers.AutoProcessor.from_pretrained = find


# --- versions: called with items, they return (n, dim) unit rows ---

def plain_loop(model, batch):
    def run(items):
        out = [model.run([model.preparer(i, "query") for i in items[n:n + batch]]) for n in range(0, len(items), batch)]
        v = np.concatenate(out)
        return v/np.linalg.norm(v, axis=1, keepdims=True)
    return run


def sentences(model, batch, image):
    def run(items): return model.encode([{"image": image(i.images[0]), "text": i.text} for i in items], batch_size=batch, normalize_embeddings=True)
    return run


def engine(model, options, modalities=("composed",), shared=False):
    import cirkit.embed.engine as e
    from cirkit.embed.engine import Digests, embed
    from cirkit.store import Store
    e.start_check = lambda *_: {}
    def run(items):
        with tempfile.TemporaryDirectory() as folder:
            model.features, digests = None, Digests()      # a new run
            images = [p for i in items for p in i.images] if shared else []
            return [embed(model, items, "query", m, Store(folder), images, digests, options=options)[1] for m in modalities][0]
    return run


def best(make, items, sizes=(1, 4, 8)):
    "The batch size that suits a version, on a part of the items."
    seconds = {}
    for size in sizes:
        run = make(size); run(items[:4])
        begun = time.perf_counter(); run(items[:16]); seconds[size] = time.perf_counter() - begun
    return min(seconds, key=seconds.get)


def compare(title, versions, items, rounds, tolerance=1e-4):
    "Median ratio of each version's time to the first one's, with its range."
    names, times, work = list(versions), {n: [] for n in versions}, {n: [] for n in versions}
    vectors = {n: run(items) for n, run in versions.items()}                 # warm
    for n in names[1:]:
        if vectors[n].shape == vectors[names[0]].shape:
            apart = 1 - np.sum(vectors[n].astype(np.float64)*vectors[names[0]], axis=1).min()
            if apart > tolerance: print(f"  {n} gives other vectors: 1 - cosine {apart:.1e}")
    for r in range(rounds):
        for n in names[r % len(names):] + names[:r % len(names)]:
            begun, cpu = time.perf_counter(), time.process_time()
            versions[n](items)
            times[n].append(time.perf_counter() - begun); work[n].append(time.process_time() - cpu)
    print(f"{title}, {len(items)} items, load {os.getloadavg()[0]:.1f}")
    for n in names:
        ratios, cpu = (np.array(t[n])/t[names[0]] for t in (times, work))
        print(f"  {n:46s} {np.median(times[n]):6.2f} s  {len(items)/np.median(times[n]):6.1f} items/s  "
              f"ratio {np.median(ratios):5.2f} ({ratios.min():.2f} to {ratios.max():.2f})  of CPU seconds {np.median(cpu):5.2f} ({cpu.min():.2f} to {cpu.max():.2f})", flush=True)


def mixed_or_equal(case, folder, args):
    from cirkit.embed.batches import Runner
    from cirkit.embed.selfcheck import start_check
    from cirkit.embed.engine import Options
    some = items(folder, args.items, case == "mixed")
    model = qwen(folder/case, some[0])
    theirs = sentence(folder/case, model, some[0])
    model.budget = args.budget
    run = Runner(model); prepared = [model.preparer(i, "query") for i in some]; run(prepared)
    tokens = [p.tokens for p in prepared]
    print(f"{case}: {min(tokens)} to {max(tokens)} tokens, engine's padding {run.meter.padding:.1%}, batches of 16 in the order of the items: "
          f"{1 - sum(tokens)/sum(16*max(tokens[n:n + 16]) for n in range(0, len(tokens), 16)):.1%}")
    begun = time.perf_counter(); start_check(model, some, "query", "composed")
    print(f"  check at the start: {time.perf_counter() - begun:.2f} s")
    versions = {f"engine, {args.workers} workers": engine(model, Options(workers=args.workers))}
    loops = {"plain loop": lambda b: plain_loop(model, b)}
    if theirs: loops |= {"sentence-transformers, files": lambda b: sentences(theirs, b, str), "sentence-transformers, opened": lambda b: sentences(theirs, b, Image.open)}
    for name, make in loops.items():
        for size in dict.fromkeys([32, 16, best(make, some)]): versions[f"{name}, batches of {size}"] = make(size)
    compare(case, versions, some, args.rounds)


def three(case, folder, args):
    from cirkit.embed.engine import Options
    from cirkit.embed.protocol import MODALITIES
    some = items(folder, args.items if case == "mllm" else args.items//3, True)
    model = qwen(folder/case, some[0]) if case == "mllm" else clip(folder/case)
    options = Options(workers=args.workers, budget=args.budget)
    versions = {"composed": engine(model, options), "composed, text, image": engine(model, options, MODALITIES, True), "the same, nothing shared": engine(model, replace(options, features=0), MODALITIES)}
    compare(f"{case}: modalities", versions, some, args.rounds)


def clip(folder):
    "CLIP ViT-B/32: 151 million weights, texts of up to 77 tokens."
    import torch
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel
    from cirkit.embed.hf_dual import load
    from cirkit.embed.tiny_dual import WORDS, clip_tokenizer
    tokenizer = clip_tokenizer(WORDS + " same dog more of them beach at night seen from above")
    ids = dict(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=ids, projection_dim=512)).save_pretrained(folder)
    tokenizer.save_pretrained(folder), CLIPImageProcessorPil().save_pretrained(folder)
    return load("bench/clip", folder)


CASES = {"mixed": mixed_or_equal, "equal": mixed_or_equal, "three": three, "mllm": three}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--items", type=int, default=96)
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare items for the engine")
    parser.add_argument("--budget", type=int, default=0, help="padded tokens of the engine's batches; 0: its default for the device")
    args = parser.parse_args()
    for case in args.cases:
        if case not in CASES: parser.error(f"no case {case!r}; there are {', '.join(CASES)}")
        with tempfile.TemporaryDirectory() as folder: CASES[case](case, Path(folder), args)
