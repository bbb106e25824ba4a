"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: frames that are sampled, their patches, and their tokens.

Values equal those of transformers' video processors, which need torchvision. Files are decoded by PyAV one frame at a
time, and only sampled frames are kept, resized and as uint8. A video travels as a data URL (RFC 2397):
`data:video/mp4;base64,FILE`, or `data:video/jpeg;base64,IMAGE,IMAGE` of frames, with the parameters `fps=` and
`nframes=` if they are set.
"""

from __future__ import annotations

import base64
import io
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

VIDEO_PIXELS, VIDEO_GRIDS, SECONDS = "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"
MOST_BYTES, MOST_FRAMES, MOST_PIXELS, MOST_VALUES = 2**28, 2**18, 2**25, 2**28
"""Bounds of a video: bytes of its file, frames in it, pixels of a frame, and float32 values of all its patches."""
FRAMES_PER_SECOND = 24.0
"""Rate of frames that come without one, as in transformers."""
_TIMESTAMPED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_DEFAULTS: dict[bool, dict[str, Any]] = {
    False: {
        "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "max_video_tokens": 128000,
    },
    True: {
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
        "max_video_tokens": 768,
    },
}
"""Settings of the video processors of Qwen2-VL (False) and Qwen3-VL (True) that a folder may leave out."""
_COMMON: dict[str, Any] = {
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "fps": 2,
    "num_frames": None,
}
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3, "rescale_factor": 1 / 255}
_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")


def video_columns(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Columns of a row's videos, as a model takes them; empty if it takes none. `config` is its `config.json`."""
    kind = config.get("model_type")
    if kind == "qwen2_5_vl":
        return VIDEO_PIXELS, VIDEO_GRIDS, SECONDS
    return (VIDEO_PIXELS, VIDEO_GRIDS) if kind == "qwen2_vl" or kind in _TIMESTAMPED else ()


def is_video(url: str) -> bool:
    """Whether a data URL is of a video."""
    return url.startswith("data:video/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Encoded video, before it is decoded."""

    parts: tuple[bytes, ...]
    """The file, or the encoded image of each frame."""
    is_file: bool
    fps: float | None
    """Frames per second to sample of a file; rate of given frames."""
    num_frames: int | None
    """Number of frames to sample; None leaves it to the rate."""
    total: int
    """Number of frames that there are."""
    rate: float
    """Frames per second on average."""
    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledVideo:
    """Sampling of a video: everything but its pixels."""

    indices: tuple[int, ...]
    """Frames that are shown."""
    height: int
    """Pixels of a shown frame."""
    width: int
    grid: tuple[int, int, int]
    """Patches along time, height and width."""
    tokens: tuple[int, ...]
    """Tokens that replace the placeholder."""
    seconds: float
    """Seconds of one step of the grid along time."""


def read_video(url: str) -> Video:
    """Read the data URL of a video, and the properties of its frames; packets of a file are counted, not decoded.

    Raises:
        ValueError: it is none, exceeds a bound, is truncated, or holds no video.
    """
    head, comma, data = url.partition(",")
    kind, *pairs = head.split(";")
    if not (kind.startswith("data:video/") and comma and pairs and pairs[-1] == "base64"):
        raise ValueError(f"a video is {url[:40]!r}..., and must be a data URL: data:video/mp4;base64,...")
    options = {name: value for name, _, value in (pair.partition("=") for pair in pairs[:-1])}
    fps = float(options["fps"]) if "fps" in options else None
    num_frames = int(options["nframes"]) if "nframes" in options else None
    if not (fps is None or 0 < fps < math.inf) or not (num_frames is None or num_frames > 0):
        raise ValueError(f"fps={fps} and nframes={num_frames} of a video; positive numbers are needed")
    if len(data) * 3 // 4 > MOST_BYTES:
        raise ValueError(f"a video has {len(data) * 3 // 4} bytes, more than {MOST_BYTES}; cut or compress it")
    is_file = kind != "data:video/jpeg"
    parts = tuple(base64.b64decode(part, validate=True) for part in ([data] if is_file else data.split(",")))
    total, rate, height, width = _counted(parts[0]) if is_file else _listed(parts, fps)
    if total > MOST_FRAMES or height * width > MOST_PIXELS:
        raise ValueError(
            f"a video has {total} frames of {width} x {height} pixels; at most {MOST_FRAMES} frames and {MOST_PIXELS} "
            "pixels each are read. Cut it, or scale it down"
        )
    if total < 2:
        raise ValueError(f"a video has {total} frames, and at least 2 are needed; give one frame as an image")
    return Video(
        parts=parts,
        is_file=is_file,
        fps=fps,
        num_frames=num_frames,
        total=total,
        rate=rate,
        height=height,
        width=width,
    )


@contextmanager
def _opened(file: bytes) -> Generator[Any]:
    """Container of a video file; what PyAV raises while it is open is a ValueError."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise ValueError("video files are decoded by PyAV, which is not installed: pip install av") from error
    try:
        with av.open(io.BytesIO(file), "r") as container:
            yield container
    except FFmpegError as error:
        raise ValueError(f"a video of {len(file)} bytes cannot be decoded: {error}") from error


def _counted(file: bytes) -> tuple[int, float, int, int]:
    """Number of frames, their rate, height and width."""
    with _opened(file) as container:
        if not container.streams.video:
            raise ValueError(f"a file of {len(file)} bytes has no video stream")
        stream = container.streams.video[0]
        total = sum(1 for packet in container.demux(stream) if packet.size)
        if total < stream.frames:
            raise ValueError(f"a video has {total} of the {stream.frames} frames that its header names; it is cut off")
        if not stream.average_rate:
            raise ValueError("a video has no frame rate; encode it anew")
        return total, float(stream.average_rate), stream.height, stream.width


def _image(encoded: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(encoded))


def _listed(parts: Sequence[bytes], fps: float | None) -> tuple[int, float, int, int]:
    """See `_counted`; of encoded images."""
    try:
        sizes = {image.size for image in map(_image, parts)}
    except OSError as error:
        raise ValueError(f"a frame of a video cannot be read: {error}") from error
    if len(sizes) > 1:
        raise ValueError(f"frames of a video have the sizes {sorted(sizes)}; they have to be the same")
    width, height = sizes.pop()
    return len(parts), fps or FRAMES_PER_SECOND, height, width


def _frames(video: Video, indices: Sequence[int]) -> Iterator[Tensor]:
    """Frames `[3, H, W]` uint8, decoded one by one."""
    wanted = frozenset(indices)
    if not video.is_file:
        for index in indices:
            image = _image(video.parts[index]).convert("RGB")
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            yield pixels.view(video.height, video.width, 3).permute(2, 0, 1)
        return
    with _opened(video.parts[0]) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index in wanted:
                yield torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
            if index == indices[-1]:
                return


class VideoProcessor:
    """Video processor of a model folder. Calls may come from any thread.

    Args:
        folder: Model folder; its `processor_config.json`, `video_preprocessor_config.json` or
            `preprocessor_config.json` has the settings. Without `do_sample_frames` in it frames are sampled, at 2 a
            second if it names no rate.
        config: Values of its `config.json`.
        encode: Function from a text to token ids, for the timestamps of Qwen3-VL and Qwen3.5.

    Raises:
        ValueError: a setting is not supported.
        OSError: the folder has none of the files.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], encode: Callable[[str], Sequence[int]]) -> None:
        settings = _settings(Path(folder))
        self._has_stamps = settings.get("video_processor_type", "").startswith("Qwen3") or (
            "video_processor_type" not in settings and config["model_type"] in _TIMESTAMPED
        )
        given = {name: value for name, value in settings.items() if value is not None}
        self._set = _COMMON | _DEFAULTS[self._has_stamps] | given
        if not self._has_stamps:
            names = (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
            self._set["size"] = self._set["size"] | {edge: given[name] for edge, name in names if name in given}
        for name, only in _FIXED.items():
            if not math.isclose(self._set.get(name, only), only, abs_tol=1e-9):
                raise ValueError(f"{name} of the video processor in {folder} is {self._set[name]}; {only} is supported")
        self.token_id = int(config["video_token_id"])
        """Id of the placeholder."""
        self.columns = video_columns(config)
        """Names of a video's columns."""
        self._ends = tuple(int(config.get(f"vision_{edge}_token_id") or 0) for edge in ("start", "end"))
        self._is_stamped, self._encode = config["model_type"] in _TIMESTAMPED, encode
        scale = torch.tensor([self._set["image_mean"], self._set["image_std"]], dtype=torch.float32)
        self._mean, self._std = (scale * (1.0 / (1 / 255)))[..., None, None]
        self.sampled = lru_cache(maxsize=4)(self._sampled)  # the rollouts of a group show the same video
        self._shown = lru_cache(maxsize=4)(self._decoded)

    def _sampled(self, url: str) -> tuple[Video, SampledVideo]:
        """Read a video and choose its frames, their size and its tokens; no frame is decoded.

        Raises:
            ValueError: see `read_video`; it cannot be sampled, or would take too much memory.
        """
        video = read_video(url)
        indices = self._indices(video)
        height, width = self._size(len(indices), video.height, video.width)
        side, step, merge = (self._set[name] for name in ("patch_size", "temporal_patch_size", "merge_size"))
        grid = -(-len(indices) // step), height // side, width // side
        if (values := math.prod(grid) * 3 * step * side**2) > MOST_VALUES:
            raise ValueError(
                f"a video shows {len(indices)} frames of {width} x {height} pixels, {values} values of patches, and "
                f"{MOST_VALUES} are the limit; lower its fps or nframes, or max_pixels of the folder's video processor"
            )
        seconds = step * video.total / (len(indices) * video.rate)
        each = (self.token_id,) * (grid[1] * grid[2] // merge**2)
        tokens = each * grid[0]
        if self._is_stamped:
            times = [index / video.rate for index in (*indices, *[indices[-1]] * (-len(indices) % step))]
            starts = [(times[at] + times[at + step - 1]) / 2 for at in range(0, len(times), step)]
            start, end = self._ends
            stamped = [(*self._encode(f"<{time:.1f} seconds>"), start, *each, end) for time in starts]
            tokens = tuple(token for run in stamped for token in run)
        found = SampledVideo(indices=indices, height=height, width=width, grid=grid, tokens=tokens, seconds=seconds)
        return video, found

    def read(self, url: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Tokens of a video, and the values of its columns.

        Raises:
            ValueError: see `read_video`; it cannot be sampled or decoded, or would take too much memory.
        """
        _, sampled = self.sampled(url)
        values = {
            VIDEO_PIXELS: self._patches(self._shown(url), sampled.grid),
            VIDEO_GRIDS: torch.tensor([sampled.grid]),
            SECONDS: torch.tensor([sampled.seconds]),
        }
        return sampled.tokens, {name: values[name] for name in self.columns}

    def _indices(self, video: Video) -> tuple[int, ...]:
        step, total = self._set["temporal_patch_size"], video.total
        asked = video.num_frames or (None if video.is_file and video.fps else self._set["num_frames"])
        is_sampled = asked or (video.is_file and video.fps) or self._set.get("do_sample_frames", True)
        if not is_sampled:
            return tuple(range(total))
        least, most = self._set["min_frames"], self._set["max_frames"]
        wanted = total / video.rate * ((video.is_file and video.fps) or self._set["fps"])
        if self._has_stamps:
            count = asked or min(max(int(wanted), least), most)
            count = min(count, total)
            apart = (total - 1) / max(count - 1, 1)
            return tuple(round(index * apart) for index in range(count))
        most = min(most, total) // step * step
        count = round(asked / step) * step if asked else math.floor(min(max(wanted, least), most) / step) * step
        count = min(max(count, step), total)
        return tuple(torch.arange(0, total, total / count).int().tolist())

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of resized frames: multiples of a feature's side, with pixels between the bounds."""
        least, most = self._set["size"]["shortest_edge"], self._set["size"]["longest_edge"]
        step, side = self._set["temporal_patch_size"], self._set["patch_size"] * self._set["merge_size"]
        is_capped, budget = self._set.get("cap_pixels_per_frame"), self._set["max_video_tokens"] * side**2
        count, rounded = 1, 1
        if self._has_stamps:  # the bounds are of all frames together
            count, rounded = num_frames, round(num_frames / step) * step
            if is_capped:
                most = max(min(budget, most // num_frames), int(least * 1.05)) * num_frames
            if min(height, width) < side:
                scale = max(side / height, side / width)
                height, width = int(height * scale), int(width * scale)
        elif is_capped:
            most = max(min(most, int(budget * 0.9) * step // num_frames), int(least * 1.05))
        if max(height, width) > 200 * min(height, width):
            raise ValueError(f"a video of {width} x {height} pixels is more than 200 times as long as it is wide")
        tall, wide = round(height / side) * side, round(width / side) * side
        if rounded * tall * wide > most:
            scale = math.sqrt(count * height * width / most)
            return (
                max(side, math.floor(height / scale / side) * side),
                max(side, math.floor(width / scale / side) * side),
            )
        if rounded * tall * wide < least:
            scale = math.sqrt(least / (count * height * width))
            return math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
        return tall, wide

    def _decoded(self, url: str) -> Tensor:
        """`[frames, 3, height, width]` uint8 of the sampled frames."""
        video, sampled = self.sampled(url)
        size = sampled.height, sampled.width
        shown = torch.empty(len(sampled.indices), 3, *size, dtype=torch.uint8)
        found = 0
        try:
            for frame in _frames(video, sampled.indices):
                is_same = frame.shape[1:] == size
                shown[found] = frame if is_same else functional.interpolate(
                    frame[None], size, mode="bicubic", align_corners=False, antialias=True
                )[0]  # fmt: skip
                found += 1
        except (OSError, ValueError) as error:
            raise ValueError(f"frame {found} of those sampled from a video cannot be decoded: {error}") from error
        if found < len(shown):
            raise ValueError(f"a video has {video.total} frames, and its decoder gave fewer; it is damaged")
        return shown

    def _patches(self, shown: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """`[patches, values of a patch]` float32, normalised."""
        side, step, merge = (self._set[name] for name in ("patch_size", "temporal_patch_size", "merge_size"))
        time, rows, columns = grid
        patches = torch.empty(time, rows * columns, 3 * step * side**2)
        for at in range(time):
            frames = shown[at * step : (at + 1) * step].float().sub_(self._mean).div_(self._std)
            frames = torch.cat([frames, frames[-1:].expand(step - len(frames), -1, -1, -1)])
            cut = frames.view(step, 3, rows // merge, merge, side, columns // merge, merge, side)
            patches[at] = cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
        return patches.flatten(0, 1)


def _settings(folder: Path) -> dict[str, Any]:
    """Settings of the folder's video processor, else of its image processor, as transformers finds them."""
    for name in _FILES:
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text())
            if name != _FILES[0]:
                return settings
            if "video_processor" in settings:
                return settings["video_processor"]
    raise OSError(f"{folder} has none of {', '.join(_FILES)}")
