#!/usr/bin/env python3
"""Check this release: python3 verify.py [--sums HEX] [FOLDER]

Needs Python 3.8 or later and nothing else. Prints a line for each check; ends with code 0, or names the first fault and
ends with code 1. HEX is the SHA-256 of SHA256SUMS as its publisher states it in another place: with it, the check covers
the whole release, this file included. Nothing is written and nothing is unpacked. Files that a hub's client adds to
a download (.git, .gitattributes, .cache) are left aside.
"""
import argparse
import hashlib
import json
import os
import re
import sys
import tarfile

MOST = 1 << 28         # bytes of one image
TEXT = 1 << 31         # bytes of a table
BLOCK = 1 << 20        # bytes that are read at a time
CLIENT = {".git", ".gitattributes", ".cache"}
PLAIN = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)")


class Fault(Exception):
    "What is wrong, in one line."


def need(ok, what):
    if not ok: raise Fault(what)


def shown(text):
    "A name on one printable line."
    return ascii(text)[:200]


def sha256(file, size=None):
    "The hash of a file, or of its next `size` bytes, and how many bytes that were."
    found, done = hashlib.sha256(), 0
    while size is None or done < size:
        data = file.read(BLOCK if size is None else min(BLOCK, size - done))
        if not data: break
        found.update(data)
        done += len(data)
    return found.hexdigest(), done


class Release:
    def __init__(self, folder): self.folder = folder

    def path(self, name): return os.path.join(self.folder, *name.split("/"))

    def text(self, name):
        need(os.path.getsize(self.path(name)) <= TEXT, f"{name}: over {TEXT:,} bytes")
        try:
            with open(self.path(name), encoding="utf-8") as f: return f.read()
        except UnicodeDecodeError: raise Fault(f"{name}: is not UTF-8") from None

    def value(self, name, text, where=""):
        def refuse(constant): raise ValueError(f"{constant} is no JSON")
        try: value = json.loads(text, parse_constant=refuse)
        except (ValueError, RecursionError) as e: raise Fault(f"{name}{where}: is not JSON ({e})") from None
        need(isinstance(value, dict), f"{name}{where}: is no object")
        return value

    def json(self, name): return self.value(name, self.text(name))

    def rows(self, name):
        lines = self.text(name).split("\n")
        return [self.value(name, line, f" line {n}") for n, line in enumerate(lines, 1) if line.strip()]

    # ---- the checks, in this order

    def files(self, sums=None):
        "files: all that are listed, no others, no links"
        need(os.path.isfile(self.path("SHA256SUMS")) and not os.path.islink(self.path("SHA256SUMS")), "SHA256SUMS: missing")
        with open(self.path("SHA256SUMS"), "rb") as f: digest = sha256(f)[0]
        need(sums in (None, digest), f"SHA256SUMS: its hash is {digest}, not the one that was given")
        self.listed = {}
        for n, line in enumerate(self.text("SHA256SUMS").splitlines(), 1):
            match = PLAIN.fullmatch(line)
            need(match and match[2] not in self.listed, f"SHA256SUMS line {n}: is no hash and plain name, or occurs twice")
            self.listed[match[2]] = match[1]
        there = set()
        for folder, folders, files in os.walk(self.folder):
            if folder == self.folder: folders[:], files = set(folders) - CLIENT, sorted(set(files) - CLIENT)
            for name in sorted(folders) + sorted(files):
                path = os.path.join(folder, name)
                short = os.path.relpath(path, self.folder).replace(os.sep, "/")
                need(not os.path.islink(path), f"{shown(short)}: is a link")
                if name in folders: continue
                need(os.path.isfile(path), f"{shown(short)}: is no plain file")
                there.add(short)
        for name in sorted(self.listed): need(name in there, f"{name}: missing")
        for name in sorted(there - {"SHA256SUMS"}): need(name in self.listed, f"{shown(name)}: is not listed in SHA256SUMS")
        return f"{len(self.listed)} files"

    def hashes(self):
        "hashes: every file is the one that was published"
        size = 0
        for name, expected in self.listed.items():
            with open(self.path(name), "rb") as f: found, bytes_ = sha256(f)
            need(found == expected, f"{name}: changed since publication (SHA-256 {found[:12]}, not {expected[:12]})")
            size += bytes_
        return f"{size:,} bytes"

    def tables(self):
        "tables: ids are unique, counts are those stated"
        self.about = self.json("release.json")
        need(self.about.get("format") == "cirkit-release/1", "release.json: is of another format")
        self.queries, self.corpus, self.instances, self.index = (
            self.rows(name) for name in ("queries.jsonl", "corpus.jsonl", "instances.jsonl", "images.jsonl"))
        for name, key, rows in (("queries.jsonl", "id", self.queries), ("corpus.jsonl", "id", self.corpus),
                                ("instances.jsonl", "qid", self.instances), ("images.jsonl", "image", self.index)):
            seen = set()
            for n, row in enumerate(rows, 1):
                id = row.get(key)
                need(isinstance(id, str) and id, f"{name} row {n}: has no {key}")
                need(id not in seen, f"{name} row {n}: {key} {shown(id)} occurs twice")
                seen.add(id)
        subcategories = {}
        for q in self.queries: subcategories[q.get("subcategory", "")] = subcategories.get(q.get("subcategory", ""), 0) + 1
        count = lambda side: sum(len(row.get(side) or ()) for row in self.instances)
        found = {"queries": len(self.queries), "gallery": len(self.corpus), "images": len(self.index), "positives": count("pos"), "negatives": count("neg")}
        for where, stated in (("release.json", self.about.get("counts")), ("benchmark.json", self.json("benchmark.json").get("counts"))):
            for key, n in found.items():
                need(isinstance(stated, dict) and stated.get(key) == n, f"{where}: does not state the {n} {key} that there are")
        need(self.about.get("subcategories") == subcategories, "release.json: the queries of each subcategory are not as stated")
        return ", ".join(f"{n:,} {key}" for key, n in found.items())

    def labels(self):
        "labels: every right answer and hard negative exists, and no candidate is both"
        queries, gallery = {q["id"] for q in self.queries}, {c["id"] for c in self.corpus}
        closed = self.json("benchmark.json").get("meta", {}).get("labels") == "closed"
        for row in self.instances:
            qid, sides = row["qid"], [row.get("pos"), row.get("neg")]
            need(qid in queries, f"instances.jsonl: {shown(qid)} is no query")
            for side in sides:
                need(isinstance(side, list) and all(isinstance(i, str) for i in side), f"instances.jsonl: {shown(qid)}: labels are no lists of ids")
                need(len(set(side)) == len(side), f"instances.jsonl: {shown(qid)}: an id occurs twice")
                for id in side: need(id in gallery, f"instances.jsonl: {shown(qid)}: {shown(id)} is not in corpus.jsonl")
            need(not set(sides[0]) & set(sides[1]), f"instances.jsonl: {shown(qid)}: a candidate is right and wrong")
            need(closed or sides[0], f"instances.jsonl: {shown(qid)}: has no right answer")
        for qid in sorted(queries - {row["qid"] for row in self.instances}): raise Fault(f"instances.jsonl: {shown(qid)} has no row")
        return f"{len(self.instances):,} queries"

    def images(self):
        "images: those that are used are listed, with a place in a shard"
        used = set()
        for row in self.queries + self.corpus:
            some = row.get("image") or []
            used.update([some] if isinstance(some, str) else some)
        listed = {row["image"] for row in self.index}
        for name in sorted(used - listed): raise Fault(f"images.jsonl: {shown(name)} is used and not listed")
        for name in sorted(listed - used): raise Fault(f"images.jsonl: {shown(name)} is listed and not used")
        for row in self.index:
            name = row["image"]
            parts = name.split("/")
            need(name.isprintable() and "\\" not in name and ":" not in parts[0] and not {"", ".", ".."} & set(parts) and name[0] != "~",
                 f"images.jsonl: {shown(name)} is no plain path")
            need(re.fullmatch(r"shards/images-\d{5}-[0-9a-f]{8}\.tar", str(row.get("shard"))), f"images.jsonl: {shown(name)}: has no shard")
            need(all(type(row.get(k)) is int and 0 <= row[k] for k in ("offset", "bytes")) and row["bytes"] <= MOST, f"images.jsonl: {shown(name)}: no place, or too large")
        hashes = {image: digest for digest, _, image in (line.partition("  ") for line in self.text("images.sha256").split("\n")) if image}
        need(hashes == {row["image"]: row.get("sha256") for row in self.index}, "images.sha256: does not agree with images.jsonl")
        return f"{len(used):,} images"

    def shards(self):
        "shards: each holds exactly the images listed, byte for byte"
        by = {}
        for row in self.index: by.setdefault(row["shard"], []).append(row)
        tars = sorted(name for name in self.listed if name.startswith("shards/"))
        need(tars == sorted(by), "shards: their files are not those that images.jsonl names")
        for name in tars:
            with open(self.path(name), "rb") as raw:
                try: self.shard(name, raw, by[name])
                except (tarfile.TarError, EOFError, OverflowError, ValueError, RecursionError) as e: raise Fault(f"{name}: is no sound tar ({e})") from None
        return f"{len(tars)} shards"

    def shard(self, name, raw, rows):
        with tarfile.open(fileobj=raw, mode="r:") as tar:
            for n, row in enumerate(rows, 1):
                member, where = tar.next(), f"{name} member {n}"
                need(member is not None, f"{where}: missing, {shown(row['image'])} should come here")
                need(member.type == tarfile.REGTYPE and not member.issparse(), f"{where}: {shown(member.name)} is a link, folder, device or sparse file")
                need(member.name == row["image"], f"{where}: {shown(member.name)} is here, {shown(row['image'])} is listed")
                need((member.offset_data, member.size) == (row["offset"], row["bytes"]), f"{where}: {shown(member.name)} is not at its place")
                need(set(member.pax_headers) <= {"path"} and (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", ""),
                     f"{where}: {shown(member.name)} carries a date, an owner or a comment")
                raw.seek(member.offset_data)
                need(sha256(raw, member.size) == (row.get("sha256"), row["bytes"]), f"{where}: {shown(member.name)} is another image, or cut short")
                need(not raw.read(-member.size % 512).strip(b"\0"), f"{where}: something is hidden behind {shown(member.name)}")
            more = tar.next()
            need(more is None, f"{name}: {shown(more and more.name)} is not listed")
        raw.seek(row["offset"] + row["bytes"])
        rest = raw.read(1 << 15)
        need(1024 <= len(rest) < 1 << 15 and not rest.strip(b"\0"), f"{name}: does not end after its last image")

    def fingerprint(self):
        "fingerprint: queries, gallery, labels and protocol are those that were scored"
        def digest(value): return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        def by_id(rows): return sorted(rows, key=lambda row: row["id"])
        labels = [{row["qid"]: sorted(row[side]) for row in self.instances if row[side]} for side in ("pos", "neg")]
        head = self.json("benchmark.json")
        found = digest([by_id(self.queries), digest(by_id(self.corpus)), labels, head.get("protocol")])
        for where, stated in (("release.json", self.about), ("benchmark.json", head)):
            need(stated.get("fingerprint") == found, f"{where}: states fingerprint {shown(stated.get('fingerprint'))[:14]}, the tables have {found[:12]}")
        return found[:16]

    def all(self, sums=None):
        for check in (lambda: self.files(sums), self.hashes, self.tables, self.labels, self.images, self.shards, self.fingerprint):
            doc = self.files.__doc__ if check.__name__ == "<lambda>" else check.__doc__
            try: found = check()
            except (AttributeError, TypeError, KeyError, MemoryError, RecursionError) as e: raise Fault(f"{doc.partition(':')[0]}: a file is not of the shape that it should have ({e!r:.100})") from None
            print(f"ok  {doc} ({found})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", default=os.path.dirname(os.path.abspath(__file__)), help="the release; default: where this file is")
    parser.add_argument("--sums", metavar="HEX", help="SHA-256 of SHA256SUMS, as its publisher states it")
    given = parser.parse_args()
    try: Release(given.folder).all(given.sums)
    except (Fault, OSError) as e:
        print(f"FAULT  {e}", file=sys.stderr)
        return 1
    print("The release is whole.")
    return 0


if __name__ == "__main__": sys.exit(main())
