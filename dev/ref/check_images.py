"""
Holds llmc/files/image.h, llmc/ops/image_resize.h and llmc/models/image_processor.h against Pillow and transformers,
which are right by definition: random files through both, bytes and bits compared.

    python dev/ref/check_images.py                            400 files of each kind, 10,000 sizes; half a minute
    python dev/ref/check_images.py --files 3000 --seed 7      more of them, others

Compared are
  - files: image_parse with transformers' load_image, every byte. PNG of every depth and colour, interlaced or not,
    animated or not, with palettes, tRNS, Exif (also behind the pixels, as text, as XMP); JPEG in grey, YCbCr, RGB, CMYK
    and YCCK, each subsampling, progressive, with restart markers, Exif and XMP. Both must take all of them;
  - damaged files: what Pillow refuses is refused. What Pillow takes and image.h does not is counted, and shown with
    --verbose;
  - orientations of Exif blocks with any entries, damaged ones too, which Pillow's Exif finds;
  - sizes that smart_resize gives, of images and of videos;
  - resized images, every byte;
  - pixel values of such files by image_patches_read, every bit, and the grid: those of load_image and
    Qwen2VLImageProcessorPil;
  - of videos those of its parts: Pillow's resize, the same arithmetic, and the patchify of Qwen3VLVideoProcessor, whose
    own resize is torchvision's and has other bytes.
Status: 0 all equal, 1 not. Needs transformers, Pillow and torch.
"""
import argparse
import ctypes
import io
import json
import os
import re
import shlex
import struct
import subprocess
import tempfile
import warnings
import zlib

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
warnings.simplefilter("ignore")  # of Pillow, on damaged Exif

try:
    import torch
    from PIL import Image, ImageFile
    from transformers.image_utils import load_image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video
except ImportError as missing:
    print(f"skipped: {missing}")
    print("0 passed, 0 failed, 1 skipped")
    raise SystemExit(0)

PROCESSORS = [  # of Qwen3.6; of Qwen2-VL with its older names; small and odd
    {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16,
     "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {"min_pixels": 3136, "max_pixels": 12845056},
    {"size": {"shortest_edge": 100, "longest_edge": 20000}, "patch_size": 5, "merge_size": 3, "temporal_patch_size": 3,
     "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
]


# ---- the C side ----

class C:
    def __init__(self, folder):
        path = os.path.join(folder, "images_shared.so")
        with open(os.path.join(ROOT, "Makefile"), encoding="utf-8") as file:
            text = file.read()
        libraries = [re.search(rf"^{name} *= *(.*)$", text, re.MULTILINE).group(1) for name in ("IMAGE_LIBS", "LIBS")]
        command = [os.environ.get("CC", "cc"), "-std=gnu11", "-D_GNU_SOURCE", "-O3", "-march=native", "-fopenmp",
                   "-ffp-contract=off", "-fPIC", "-shared", "-I" + ROOT,
                   os.path.join(ROOT, "dev", "ref", "images_shared.c"), "-o", path, *" ".join(libraries).split()]
        if subprocess.run(command).returncode != 0:
            raise SystemExit("check_images.py: the C code does not compile: " + shlex.join(command))
        self.library = ctypes.CDLL(path)
        for name in ("open", "pixels"):
            getattr(self.library, "shared_image_" + name).restype = ctypes.c_void_p
        self.library.shared_processor_open.restype = self.library.shared_processor_patches.restype = ctypes.c_void_p
        self.library.shared_processor_json.restype = self.library.shared_processor_read.restype = ctypes.c_void_p
        self.reason = ctypes.create_string_buffer(500)

    def read(self, data):
        """(height, width, 3) bytes; None: refused, and self.reason says why."""
        size = (ctypes.c_int * 2)()
        image = self.library.shared_image_open(data, ctypes.c_size_t(len(data)), self.reason, ctypes.c_size_t(500))
        if not image:
            return None
        at = self.library.shared_image_pixels(ctypes.c_void_p(image), size)
        pixels = np.frombuffer(ctypes.string_at(at, 3 * size[0] * size[1]), np.uint8).reshape(size[0], size[1], 3)
        self.library.shared_image_close(ctypes.c_void_p(image))
        return pixels

    def why(self):
        return self.reason.value.decode()

    def resize(self, pixels, h, w):
        out, pixels = np.empty((h, w, 3), np.uint8), np.ascontiguousarray(pixels)
        to, by = out.ctypes.data_as(ctypes.c_void_p), pixels.ctypes.data_as(ctypes.c_void_p)
        self.library.shared_image_resize(to, h, w, by, *pixels.shape[:2])
        return out

    def processor(self, config, is_video=0):
        text = json.dumps(config).encode()
        p = self.library.shared_processor_open(text, is_video, self.reason, ctypes.c_size_t(500))
        if not p:
            raise SystemExit(f"check_images.py: {config} is refused: {self.why()}")
        return ctypes.c_void_p(p)

    def written(self, p):
        at = self.library.shared_processor_json(p)
        return json.loads(ctypes.string_at(at))

    def size(self, p, frames, height, width):
        size = (ctypes.c_int * 2)()
        return tuple(size) if self.library.shared_processor_size(size, p, frames, height, width) else None

    def patches(self, p, frames):
        """(values, grid) of (n, height, width, 3) bytes."""
        grid, frames = (ctypes.c_int * 5)(), np.ascontiguousarray(frames)
        at = self.library.shared_processor_patches(p, frames.ctypes.data_as(ctypes.c_void_p), *frames.shape[:3], grid)
        return self.taken(at, grid)

    def patches_of(self, p, path):
        """The same of an image file; None: refused, and self.reason says why."""
        grid = (ctypes.c_int * 5)()
        at = self.library.shared_processor_read(p, path.encode(), grid, self.reason, ctypes.c_size_t(500))
        return self.taken(at, grid) if at else None

    def taken(self, at, grid):
        values = np.frombuffer(ctypes.string_at(at, 4 * grid[3] * grid[4]), np.float32).reshape(grid[3], grid[4])
        self.library.shared_free(ctypes.c_void_p(at))
        return values, tuple(grid[:3])


# ---- files ----

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif_block(orientation, rng):
    """An Exif block in one of the forms that are met."""
    big, kind = rng.integers(2), rng.choice([3, 3, 3, 4, 8, 9, 1, 5])
    order = ">" if big else "<"
    size = {1: 1, 3: 2, 4: 4, 5: 8, 8: 2, 9: 4}[int(kind)]
    code = {1: "B", 3: "H", 4: "I", 5: "Q", 8: "h", 9: "i"}[int(kind)]
    value = struct.pack(order + code, orientation)
    n = int(rng.choice([1, 1, 1, 3]))
    values = value * n
    entries = [struct.pack(order + "HHI", 0x010F, 2, 4) + b"abc\0"] * int(rng.integers(3))
    n_entries = len(entries) + 1
    end = 8 + 2 + 12 * n_entries + 4
    place = values.ljust(4, b"\0") if len(values) <= 4 else struct.pack(order + "I", end)
    entries.append(struct.pack(order + "HHI", 0x0112, kind, n) + place)
    begin = (b"MM\0*" if big else b"II*\0") + struct.pack(order + "IH", 8, n_entries)
    block = begin + b"".join(entries) + b"\0\0\0\0" + values
    return block if size * n > 4 or rng.integers(2) else block[:end]


def xmp_text(orientation, rng):
    forms = ['<rdf:Description tiff:Orientation="%d"/>', "<tiff:Orientation>%d</tiff:Orientation>",
             "<tiff:Orientation/> %d"]
    return ("<x:xmpmeta>" + forms[rng.integers(3)] % orientation + "</x:xmpmeta>").encode()


# x, y, steps of x and y
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
PNG_KINDS = [(0, 1), (0, 2), (0, 4), (0, 8), (2, 8), (2, 16), (3, 1), (3, 2), (3, 4), (3, 8), (4, 8), (4, 16), (6, 8),
             (6, 16)]  # colour, bits


def png_rows(samples, bits, rng):
    """(rows, columns, channels) as filtered rows; the filter is one of three, by chance."""
    out = []
    for row in samples:
        flat = row.reshape(-1)
        if bits == 16:
            packed = flat.astype(">u2").tobytes()
        elif bits == 8:
            packed = flat.astype(np.uint8).tobytes()
        else:
            packed = np.packbits(((flat[:, None] >> np.arange(bits)[::-1]) & 1).astype(np.uint8).reshape(-1)).tobytes()
        step = max(1, bits * row.shape[1] // 8)
        if rng.integers(3) == 0:
            line = np.frombuffer(packed, np.uint8).astype(int)
            before = np.concatenate([np.zeros(step, int), line[:-step]])[:len(line)]
            out.append(b"\1" + ((line - before) % 256).astype(np.uint8).tobytes())
        else:
            out.append(b"\0" + packed)
    return b"".join(out)


def random_png(rng, height, width):
    kind, bits = PNG_KINDS[rng.integers(len(PNG_KINDS))]
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    samples = picture(rng, height, width, channels).astype(int) * 257 >> (16 - bits)
    interlaced = int(rng.integers(2))
    passes = [samples[y::dy, x::dx] for x, y, dx, dy in ADAM7] if interlaced else [samples]
    raw = b"".join(png_rows(rows, bits, rng) for rows in passes if rows.size)
    before = after = b""
    if rng.integers(3) == 0:
        before += chunk(b"gAMA", struct.pack(">I", int(rng.integers(1, 200000))))
    if rng.integers(4) == 0:
        before += chunk(b"sRGB", b"\0")
    if kind == 3:
        n = int(rng.integers(1, 2**bits + 1))  # indices beyond it are black
        before += chunk(b"PLTE", rng.integers(0, 256, 3 * n, np.uint8).tobytes())
        if rng.integers(2):
            before += chunk(b"tRNS", rng.integers(0, 256, int(rng.integers(1, n + 1)), np.uint8).tobytes())
    elif kind in (0, 2) and rng.integers(2):
        before += chunk(b"tRNS", b"".join(struct.pack(">H", int(s)) for s in samples[0, 0]))
    orientation = int(rng.integers(0, 10))
    how = rng.integers(8)
    block = exif_block(orientation, rng)
    if how == 0: before += chunk(b"eXIf", block)
    if how == 1: after += chunk(b"eXIf", block)
    if how == 2: before += chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp_text(orientation, rng))
    if how == 3: before += chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp_text(orientation, rng)))
    if how in (4, 5):
        digits = (b"Exif\0\0" + block).hex()
        lines = "\n".join(digits[i:i + 72] for i in range(0, len(digits), 72))
        text = f"\nexif\n{len(block) + 6:8}\n{lines}\n".encode()
        key = b"Raw profile type exif\0"
        before += chunk(b"zTXt", key + b"\0" + zlib.compress(text)) if how == 4 else chunk(b"tEXt", key + text)
    if how == 6:
        other = xmp_text(int(rng.integers(0, 10)), rng)
        before += chunk(b"eXIf", block) + chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + other)
    packed = zlib.compress(raw, int(rng.integers(1, 10)))
    animated = int(rng.integers(6) == 0)  # a second frame, the same backwards
    if animated:
        place = struct.pack(">IIIIHHBB", width, height, 0, 0, 1, 10, 0, 0)
        before += chunk(b"acTL", struct.pack(">II", int(rng.integers(1, 3)), 0))
        if rng.integers(2): before += chunk(b"fcTL", struct.pack(">I", 0) + place)
        n = before.count(b"fcTL")
        after = chunk(b"fcTL", struct.pack(">I", n) + place) + chunk(b"fdAT", struct.pack(">I", n + 1) + packed) + after
    cut = int(rng.integers(len(packed)))
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, interlaced)
    data = chunk(b"IHDR", header) + before + chunk(b"IDAT", packed[:cut]) + chunk(b"IDAT", packed[cut:]) + after
    what = f"PNG kind {kind}, {bits} bits, {width} x {height}, interlaced {interlaced}, animated {animated}, "
    return b"\x89PNG\r\n\x1a\n" + data + chunk(b"IEND", b""), what + f"orientation {orientation} by {how}"


def picture(rng, height, width, channels):
    """Smooth colours, noise and edges."""
    y, x = np.mgrid[:height, :width][:, :, :, None]
    a, b, c = rng.random((3, channels)) * 0.2
    image = 127 + 90 * np.sin(a * x + b * y + 6 * c) + rng.normal(0, 25 * rng.random(), (height, width, channels))
    if rng.integers(2):
        image = np.where((x // max(1, width // 3) + y // max(1, height // 4)) % 2 == 0, image, 255 - image)
    return np.clip(image, 0, 255).astype(np.uint8)


def segment(marker, data):
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def random_jpeg(rng, height, width):
    mode = ["L", "RGB", "RGB", "RGB", "rgb", "CMYK", "YCCK"][rng.integers(7)]
    channels = {"L": 1, "RGB": 3, "rgb": 3, "CMYK": 4, "YCCK": 4}[mode]
    pixels = picture(rng, height, width, channels)
    image = Image.frombytes({1: "L", 3: "RGB", 4: "CMYK"}[channels], (width, height), pixels.tobytes())
    options = {"quality": int(rng.integers(5, 101)), "progressive": bool(rng.integers(2)),
               "optimize": bool(rng.integers(2))}
    if mode == "RGB": options["subsampling"] = int(rng.integers(3))
    if mode == "rgb": options["keep_rgb"] = True
    if rng.integers(4) == 0: options["restart_marker_blocks"] = int(rng.integers(1, 50))
    out = io.BytesIO()
    ImageFile.MAXBLOCK = 1 << 22  # a progressive file is written in one piece
    image.save(out, "JPEG", **options)
    data = out.getvalue()
    if mode == "YCCK":
        at = data.index(b"Adobe")
        data = data[:at + 11] + b"\2" + data[at + 12:]
    orientation = int(rng.integers(0, 10))
    how = rng.integers(5)
    block = exif_block(orientation, rng)
    extra = b""
    if how in (0, 4): extra += segment(0xE1, b"Exif\0\0" + block)
    if how == 1:
        cut = int(rng.integers(len(block)))
        extra += segment(0xE1, b"Exif\0\0" + block[:cut]) + segment(0xE1, b"Exif\0\0" + block[cut:])
    if how in (2, 4):
        extra += segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp_text(int(rng.integers(0, 10)), rng))
    what = f"JPEG {mode}, {width} x {height}, {options}, orientation {orientation} by {how}"
    return data[:2] + extra + data[2:], what


# what exif_transpose does for each orientation
TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
         5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
         8: Image.Transpose.ROTATE_90}


def turned(path):
    """load_image of a file with an odd Exif block, on which Pillow may end: where it reads it, or writes it again."""
    image = Image.open(path)
    image.load()
    try:
        turn = TURNS.get(image.getexif().get(0x112, 1))
    except (SyntaxError, struct.error):
        turn = None
    return (image if turn is None else image.transpose(turn)).convert("RGB")


def theirs(data):
    """As transformers has it; None: refused."""
    with tempfile.NamedTemporaryFile(suffix=".image") as file:
        file.write(data)
        file.flush()
        for read in (load_image, turned):
            try:
                return np.array(read(file.name))
            except Exception:
                pass
        return None


def random_size(rng):
    most = [(4, 4), (40, 40), (500, 700)][rng.integers(3)]
    return int(rng.integers(1, most[0] + 1)), int(rng.integers(1, most[1] + 1))


# ---- what is compared ----

class Report:
    def __init__(self):
        self.passed = self.failed = 0

    def count(self, ok, what):
        self.passed += bool(ok)
        self.failed += not ok
        if not ok and self.failed < 20:
            print(f"FAIL  {what}")


def check_files(c, rng, n, make, name, report):
    worst = n_failed = 0
    for _ in range(n):
        data, what = make(rng, *random_size(rng))
        ours, want = c.read(data), theirs(data)
        why = c.why() if ours is None else "refused by Pillow" if want is None else f"{ours.shape} against {want.shape}"
        same = ours is not None and want is not None and np.array_equal(ours, want)
        if ours is not None and want is not None and ours.shape == want.shape:
            worst = max(worst, int(np.abs(ours.astype(int) - want).max()))
        report.count(same, f"{what}: {why}")
        n_failed += not same
    print(f"{name}: {n} files, {n - n_failed} equal to Pillow's bytes, worst difference {worst}")


def check_damaged(c, rng, n, report, verbose):
    """
    Cut short, or a few bytes changed. Never may ours take what Pillow refuses, or differ where both take it; but of a
    progressive JPEG that lacks a scan, libjpeg smooths blocks, and each version has its own way: by a few of 255.
    """
    stricter = taken = smoothed = 0
    for i in range(n):
        data, what = (random_png if i % 2 else random_jpeg)(rng, *random_size(rng))
        if rng.integers(2):
            data = data[:int(rng.integers(len(data)))]
            what += f", cut at {len(data)}"
        else:
            bad = bytearray(data)
            for _ in range(int(rng.integers(1, 4))):
                bad[int(rng.integers(len(bad)))] = int(rng.integers(256))
            data, what = bytes(bad), what + ", changed"
        ours, want = c.read(data), theirs(data)
        taken += ours is not None
        stricter += ours is None and want is not None
        if verbose and ours is None and want is not None: print(f"      stricter: {what}: {c.why()}")
        same = ours is None or (want is not None and np.array_equal(ours, want))
        if not same and b"\xff\xc2" in data and want is not None and ours.shape == want.shape:
            same = np.abs(ours.astype(int) - want).max() <= 32
            smoothed += same
        report.count(same, what + ": " + ("refused by Pillow" if want is None else "differs"))
    print(f"damaged: {n} files, {taken} taken, with Pillow's bytes but for {smoothed} that were smoothed otherwise; "
          f"{stricter} refused that Pillow takes")


def odd_exif(rng):
    """A block of entries of any type and number, one of them often an orientation, some bytes changed or cut off."""
    n, order = int(rng.integers(1, 5)), "<>"[rng.integers(2)]
    size = 8 + 2 + 12 * n + 4 + int(rng.integers(40))
    block = (b"MM\0*" if order == ">" else b"II*\0") + struct.pack(order + "IH", 8, n)
    for _ in range(n):
        v = int(rng.integers(10))
        as_float, = struct.unpack("<I", struct.pack("<f", v))
        value = int(rng.choice([v, v << 16, v << 24, as_float, rng.integers(size + 5)]))  # the last is an offset
        count = int(rng.choice([0, 1, 1, 1, 2, 3, 5, 9, 40, 2**31]))
        tag = int(rng.choice([0x112, 0x112, 0x10F, 0x10E, 0x100]))
        block += struct.pack(order + "HHII", tag, int(rng.integers(18)), count, value)
    block += b"\0\0\0\0"
    while len(block) < size:
        v = int(rng.integers(9))
        block += [struct.pack(order + "II", v, int(rng.integers(3))), struct.pack(order + "d", v),
                  struct.pack(order + "Q", v), struct.pack(order + "ii", -v, -1)][rng.integers(4)]
    block = bytearray(block)
    if rng.integers(9) == 0: block[2:4] = [b"\0*", b"*\0", b"\0+", b"+\0"][rng.integers(4)]
    for _ in range(int(rng.choice([0, 0, 2]))): block[rng.integers(len(block))] = rng.integers(256)
    return bytes(block if rng.integers(4) else block[:rng.integers(len(block) + 1)])


def check_exif(c, rng, n, report):
    n_said = 0
    for _ in range(n):
        block, exif = odd_exif(rng), Image.Exif()
        try:
            exif.load(block)
            want = next((i for i in range(2, 9) if exif.get(0x112) == i), 1) if 0x112 in exif else 0
        except (SyntaxError, struct.error):
            want = 1
        found = c.library.shared_orientation(block, ctypes.c_size_t(len(block)))
        n_said += want > 1
        report.count(found == want, f"orientation of {block}: expected {want}, found {found}")
    print(f"orientation: {n} odd Exif blocks, {n_said} of them turn an image")


def check_sizes(c, rng, n, report):
    for is_video in (0, 1):
        n_refused = 0
        for i in range(n):
            least, most = int(rng.choice([100, 3136, 65536, 131072])), int(rng.choice([131072, 786432, 16777216]))
            config = {"patch_size": int(rng.choice([14, 16, 5, 1])), "merge_size": int(rng.choice([1, 2, 3])),
                      "temporal_patch_size": int(rng.choice([1, 2, 3])),
                      "size": {"shortest_edge": least, "longest_edge": most}}
            p = c.processor(config, is_video)
            factor = config["patch_size"] * config["merge_size"]
            side = int(rng.choice([20, 300, 5000]))
            height, width, frames = int(rng.integers(1, side)), int(rng.integers(1, side)), int(rng.integers(1, 50))
            if i % 3 == 0: height = factor * int(rng.integers(1, 9)) + factor // 2  # halves
            bounds, temporal = (factor, least, most), config["temporal_patch_size"]
            try:
                want = (smart_resize_video(frames, height, width, temporal, *bounds) if is_video
                        else smart_resize(height, width, *bounds))
            except ValueError:
                want = None
            found = c.size(p, frames, height, width)
            c.library.shared_free(p)
            n_refused += want is None
            what = f"size of {frames} x {height} x {width}, {config}"
            report.count(found == want, f"{what}: expected {want}, found {found}")
        print(f"smart_resize of {'videos' if is_video else 'images'}: {n} sizes, {n_refused} of them refused by both")


def check_resize(c, rng, n, report):
    n_pixels = worst = 0
    for i in range(n):
        (height, width), (h, w) = random_size(rng), random_size(rng)
        if i % 5 == 0: h = height
        if i % 5 == 1: w = width
        pixels = picture(rng, height, width, 3)
        if i % 4 == 0: pixels = rng.choice(np.array([0, 255], np.uint8), (height, width, 3))
        want = np.array(Image.fromarray(pixels).resize((w, h), Image.Resampling.BICUBIC))
        found = c.resize(pixels, h, w)
        n_pixels += h * w
        worst = max(worst, int(np.abs(found.astype(int) - want).max()))
        report.count(np.array_equal(found, want), f"{height} x {width} to {h} x {w}")
    print(f"resize: {n} images, {n_pixels} pixels, worst difference {worst}")


def equal_bits(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def check_patches(c, rng, n, report):
    for config in PROCESSORS:
        processor, p, worst, n_values, n_files = Qwen2VLImageProcessorPil(**config), c.processor(config), 0.0, 0, 0
        text = json.loads(processor.to_json_string())
        report.count(c.written(p) == text, f"{config}: written differently: {c.written(p)}")
        for i in range(n):
            height, width = random_size(rng)
            if max(height, width) > 200 * min(height, width): continue
            data, what = (random_png if i % 2 else random_jpeg)(rng, height, width)
            with tempfile.NamedTemporaryFile(suffix=".image") as file:
                file.write(data)
                file.flush()
                found, image = c.patches_of(p, file.name), theirs(data)
            if found is None or image is None:
                report.count(False, f"pixel values of {what}: " + (c.why() if found is None else "refused by Pillow"))
                continue
            want, (values, grid) = processor(images=[Image.fromarray(image)], return_tensors="np"), found
            same_grid, pixels = tuple(want["image_grid_thw"][0]) == grid, want["pixel_values"]
            report.count(same_grid and equal_bits(values, pixels), f"pixel values of {what}, {config}")
            if values.shape == pixels.shape: worst = max(worst, float(np.abs(values - pixels).max()))
            n_values, n_files = n_values + values.size, n_files + 1
        print(f"pixel values: {n_files} files, {n_values} values, worst difference {worst:g}, {config}")
        c.library.shared_free(p)


def check_videos(c, rng, n, report):
    for config in PROCESSORS:
        base = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **config}
        processor = Qwen2VLImageProcessorPil(**base)
        p = c.processor({**base, "size": dict(processor.size)} if "size" not in config else base, 1)
        patch, merge, temporal = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        for _ in range(n):
            frames, (height, width) = int(rng.integers(temporal, 8)), [min(200, s) for s in random_size(rng)]
            if max(height, width) > 200 * min(height, width): continue
            video = np.stack([picture(rng, height, width, 3) for _ in range(frames)])
            bounds = processor.size["shortest_edge"], processor.size["longest_edge"]
            h, w = smart_resize_video(frames, height, width, temporal, patch * merge, *bounds)
            still = [np.array(Image.fromarray(frame).resize((w, h), Image.Resampling.BICUBIC)) for frame in video]
            still = [processor.rescale(np.moveaxis(frame, -1, 0), processor.rescale_factor) for frame in still]
            still = [processor.normalize(frame, processor.image_mean, processor.image_std) for frame in still]
            still = torch.from_numpy(np.stack(still))[None]
            want, *grid = Qwen3VLVideoProcessor.patchify(None, still, patch, merge, temporal)
            values, found = c.patches(p, video)
            same = tuple(grid) == found and equal_bits(values, want[0].numpy())
            report.count(same, f"video {frames} x {height} x {width}, {config}")
        c.library.shared_free(p)
    print(f"pixel values of videos: {len(PROCESSORS)} x {n}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=400, help="of each kind")
    parser.add_argument("--sizes", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    rng, report = np.random.default_rng(options.seed), Report()
    with tempfile.TemporaryDirectory() as folder:
        c = C(folder)
        check_files(c, rng, options.files, random_png, "PNG", report)
        check_files(c, rng, options.files, random_jpeg, "JPEG", report)
        check_damaged(c, rng, options.files, report, options.verbose)
        check_exif(c, rng, options.sizes, report)
        check_sizes(c, rng, options.sizes, report)
        check_resize(c, rng, options.files, report)
        check_patches(c, rng, options.files // 4, report)
        check_videos(c, rng, options.files // 10, report)
    print(f"{report.passed} passed, {report.failed} failed")
    raise SystemExit(report.failed > 0)


if __name__ == "__main__":
    main()
