"""Tokens, seconds and memory of a video by model family and rate: `python benchmarks/videos.py`.

A file of ten seconds at 640 x 360 and 30 frames a second is encoded, and prepared as servers do it, with the settings
that transformers' video processors have by default. Memory is the growth of the process's peak.
"""

import base64
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def film() -> str:
    import av

    file, at = io.BytesIO(), np.indices((360, 640)).sum(0)[..., None]
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for index in range(300):
            pixels = ((at + 3 * index) % [251, 241, 239]).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return base64.b64encode(file.getvalue()).decode()


def measured(family: str, fps: float, path: str) -> dict:
    from rl_csrc.inference.videos import VideoProcessor

    url = f"data:video/mp4;fps={fps};base64,{Path(path).read_text()}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "video_preprocessor_config.json").write_text("{}")
        ids = {"video_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 3}
        processor = VideoProcessor(folder, {"model_type": family, **ids}, lambda text: [4] * len(text))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        planned = len(processor.sampled(url)[1].tokens)
        counted, start_read = time.perf_counter() - start, time.perf_counter()
        _, values = processor.read(url)
    read = time.perf_counter() - start_read
    pixels = values["pixel_values_videos"]
    return {
        "family": family,
        "fps": fps,
        "placeholders": len(pixels) // 4,
        "tokens": planned,
        "count_s": round(counted, 3),
        "read_s": round(read, 3),
        "patches_mb": round(pixels.nbytes / 2**20, 1),
        "peak_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10, 1),
    }


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.stdout.write(json.dumps(measured(sys.argv[1], float(sys.argv[2]), sys.argv[3])) + "\n")
        sys.exit()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as encoded:
        encoded.write(film())
        encoded.flush()
        for family in ("qwen2_5_vl", "qwen3_vl"):
            for fps in ("1", "2", "4"):
                subprocess.run([sys.executable, __file__, family, fps, encoded.name], check=True)
