"""Encoded videos for tests, and values of transformers' own video processors, which tests compare with.

They need torchvision: `uv run --with torchvision python csrc/tests/support/video_reference.py` writes the values.
"""

import base64
import io
from fractions import Fraction
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("video_reference.npz")
WIDE = {"size": {"shortest_edge": 64, "longest_edge": 16 * 64}, "patch_size": 4}
LONG = {"size": {"shortest_edge": 1024, "longest_edge": 40 * 64}, "patch_size": 4}
CASES = {  # family, (frames, height, width), rate, settings of the processor, number of frames asked for
    "qwen2_rate": ("qwen2_5_vl", (9, 22, 30), 4.0, WIDE | {"fps": 2}, None),
    "qwen2_count": ("qwen2_vl", (7, 90, 70), 25.0, WIDE, 5),
    "qwen2_small": ("qwen2_vl", (6, 4, 9), 24.0, WIDE | {"fps": 12, "min_frames": 2}, None),
    "qwen2_capped": ("qwen2_5_vl", (8, 64, 64), 8.0, WIDE | {"cap_pixels_per_frame": True, "max_video_tokens": 12}, 8),
    "qwen3_rate": ("qwen3_vl", (9, 22, 30), 3.0, LONG, None),
    "qwen3_odd": ("qwen3_5", (11, 90, 70), 29.97, LONG, 5),
    "qwen3_small": ("qwen3_vl", (5, 6, 5), 24.0, LONG, None),
    "qwen3_capped": ("qwen3_vl", (6, 64, 64), 2.0, LONG | {"cap_pixels_per_frame": True, "max_video_tokens": 6}, None),
    "qwen3_many": ("qwen3_vl", (30, 16, 16), 5.0, LONG | {"max_frames": 7}, None),
}


def frames_of(name):
    """Frames [n, H, W, 3] uint8: coarse noise that moves."""
    count, height, width = CASES[name][1]
    drawn = np.random.default_rng(len(name)).integers(0, 256, (count, height // 2 + 1, width // 2 + 1, 3), np.uint8)
    return drawn.repeat(2, 1).repeat(2, 2)[:, :height, :width]


def url_of_frames(frames, rate, count=None):
    from PIL import Image

    parts = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "png")
        parts.append(base64.b64encode(file.getvalue()).decode())
    return f"data:video/jpeg;fps={rate}{f';nframes={count}' if count else ''};base64,{','.join(parts)}"


def url_of_file(file, options=""):
    return f"data:video/mp4{options};base64,{base64.b64encode(file).decode()}"


def encoded(frames, *, rate=10, codec="libx264", kind="mp4", times=None):
    """A file of frames [n, H, W, 3] uint8; `times` are their timestamps in steps of 1 / rate."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv444p" if codec == "libx264" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index if times is None else times[index]
            frame.time_base = Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def positions_of(kinds, inputs, per_second):
    import torch

    """[3, T] positions, group by group: text counts on from the highest position so far (2409.12191)."""
    found, none = torch.empty(3, 0, dtype=torch.int64), torch.empty(0, 3)
    images, videos = (inputs.get(f"{kind}_grid_thw", none).tolist() for kind in ("image", "video"))
    seconds = inputs.get("second_per_grid_ts", torch.empty(0)).tolist()
    if per_second is None:  # a video is one group for each of its steps
        videos = [[1, height, width] for steps, height, width in videos for _ in range(steps)]
    at = 0
    while at < len(kinds):
        start = int(found.max()) + 1 if found.numel() else 0
        if not kinds[at]:
            found = torch.cat([found, torch.tensor([start]).expand(3, 1)], 1)
            at += 1
            continue
        steps, height, width = (images if kinds[at] == 1 else videos).pop(0)
        apart = (per_second or 1) * seconds.pop(0) if kinds[at] == 2 and seconds else 1
        cells = torch.cartesian_prod(*map(torch.arange, (int(steps), int(height) // 2, int(width) // 2))).T
        cells = torch.cat([(cells[:1] * apart).long(), cells[1:]]) + start
        found, at = torch.cat([found, cells], 1), at + cells.shape[1]
    return found


def made(name, folder):
    """Values of one case by transformers, with the tokenizer of a folder."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    family, _, rate, settings, asked = CASES[name]
    is_new, frames = family.startswith("qwen3"), frames_of(name)
    videos = (Qwen3VLVideoProcessor if is_new else Qwen2VLVideoProcessor)(**settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = (Qwen3VLProcessor if is_new else Qwen2_5_VLProcessor)(Qwen2VLImageProcessorPil(), tokenizer, videos)
    processor.vision_start_token, processor.vision_end_token = "<vision>", "</vision>"
    found = processor(
        text=["a<vision><video></vision>b"],
        videos=[frames],
        video_metadata=[VideoMetadata(total_num_frames=len(frames), fps=rate)],
        do_sample_frames=True,
        return_metadata=True,
        return_tensors="np",
        **({"num_frames": asked, "fps": None} if asked else {}),
    )
    scale = np.array([videos.image_mean, videos.image_std]).reshape(2, 1, 3, 1)
    patches = np.asarray(found["pixel_values_videos"])
    levels = (patches.reshape(len(patches), 3, -1) * scale[1] + scale[0]) * 255
    return {
        "levels": levels[::9].round().astype(np.uint8),  # resized pixels of some patches, exactly
        "sum": np.float64(patches.astype(np.float64).sum()),
        "grid": np.asarray(found["video_grid_thw"])[0],
        "ids": np.asarray(found["input_ids"])[0].astype(np.int16),
        "seconds": np.asarray(found.get("second_per_grid_ts", [0.0]), dtype=np.float64),
        "indices": np.asarray(found["video_metadata"][0].frames_indices),
    }


if __name__ == "__main__":
    import tempfile

    from rl_rollout.testing import write_tiny_vl_model

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_vl_model(Path(folder))
        values = {f"{name}/{key}": value for name in CASES for key, value in made(name, folder).items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **values)
    FILE.write_bytes(buffer.getvalue())
