"""Rows with images and videos in rl-sft, rl-dpo and rl-rm: numbers of transformers, and runs that learn from them."""

import base64
import io
import json
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
from csrc.tests.support.video_reference import encoded as film_file
from csrc.tests.support.video_reference import url_of_file
from PIL import Image
from pyarrow import parquet
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from rl_csrc.inference.images import ImageProcessor, rope_positions
from rl_engine import ConfigError, EngineConfig, Head, LoraConfig, Precision, create_engine
from rl_engine.batch.row_batch import RowBatch
from rl_engine.errors import DataError
from rl_engine.finetune.cli import distill_main, dpo_main, rm_main, sft_main
from rl_engine.finetune.images import with_pixels
from rl_engine.finetune.preferences import tokenize_labelled, tokenize_pairs, tokenize_steps
from rl_engine.finetune.sft import tokenize_file
from rl_engine.losses import DpoLoss, reward_loss, sft_loss
from rl_engine.testing import write_tiny_model
from rl_rollout.testing import load_weights, write_tiny_vl_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
SEEN, FILM = {"type": "image"}, {"type": "video"}


def picture(colour=(9, 99, 200), size=(16, 16), seed=0):
    """Bytes of a PNG of about the colour."""
    draw = random.Random(seed)
    values = [min(max(value + draw.randint(-30, 30), 0), 255) for _ in range(size[0] * size[1]) for value in colour]
    file = io.BytesIO()
    Image.frombytes("RGB", size, bytes(values)).save(file, "png")
    return file.getvalue()


def url(encoded):
    return f"data:image/png;base64,{base64.b64encode(encoded).decode()}"


def film(colour=(9, 99, 200), size=(16, 16), seed=0, count=5):
    """Bytes of an mp4 file of frames of about the colour, three a second."""
    noise = np.random.default_rng(seed).integers(-30, 31, (count, size[1], size[0], 3))
    return film_file((noise + colour).clip(0, 255).astype(np.uint8), rate=3)


def asks(*parts):
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def says(text):
    return {"role": "assistant", "content": text}


def write(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: str(write_tiny_vl_model(folder / family, family=family)) for family in FAMILIES}


def taken(columns):
    """All rows, as an engine takes them."""
    batch = RowBatch(columns, needs_mask=True, device=torch.device("cpu"))
    return with_pixels(batch.select(range(batch.num_rows)))


@pytest.mark.process
def test_an_image_is_the_same_row_whichever_way_it_comes(tmp_path, models):
    model, encoded = models["qwen2_5_vl"], picture(size=(24, 16))
    for name in ("a.png", "one cat.png"):
        (tmp_path / name).write_bytes(encoded)
    chat = [asks(SEEN, "what?"), says("a cat")]
    own = [asks({"type": "image_url", "image_url": {"url": url(encoded)}}, "what?"), says("a cat")]
    rows = [
        *({"messages": chat, "images": [image]} for image in (url(encoded), str(tmp_path / "a.png"))),
        {"messages": own},
        {"messages": chat, "images": [(tmp_path / "one cat.png").as_uri()]},
        {"messages": [asks({"type": "image_url", "image_url": url(encoded)}, "what?"), says("a cat")]},
        {"messages": [asks({**SEEN, "image": str(tmp_path / "a.png")}, "what?"), says("a cat")]},
        {"prompt": chat[:1], "completion": "a cat", "images": [{"bytes": None, "path": str(tmp_path / "a.png")}]},
    ]
    parquet.write_table(pa.Table.from_pylist([{**rows[-1], "images": [{"bytes": encoded}]}]), tmp_path / "a.parquet")
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = AutoImageProcessor.from_pretrained(model)(images=[Image.open(tmp_path / "a.png")], return_tensors="pt")
    text = f"<vision>{'<image>' * (len(found['pixel_values']) // 4)}</vision>what?"
    for path in (write(tmp_path, rows), tmp_path / "a.parquet"):
        batch = taken(tokenize_file(path, model))
        for row in range(len(batch)):
            assert tokenizer.decode(batch["prompt_token_ids"][row]) == text
            assert tokenizer.decode(batch["completion_token_ids"][row]) == "a cat<eos>"
            torch.testing.assert_close(batch["pixel_values"][row], found["pixel_values"])
            assert batch["image_grid_thw"][row].equal(found["image_grid_thw"])


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_is_the_same_row_whichever_way_it_comes(tmp_path, models, family):
    model, file = models[family], film()
    path = tmp_path / "a film.mp4"
    path.write_bytes(file)
    chat = [asks({**FILM, "nframes": 2}, "what?"), says("a cat")]
    row = {"prompt": chat[:1], "completion": "a cat"}
    rows = [
        *({"messages": chat, "videos": [video]} for video in (url_of_file(file), str(path), path.as_uri())),
        {"messages": [asks({**FILM, "video": str(path), "nframes": 2}, "what?"), says("a cat")]},
        {"messages": [asks({"type": "video_url", "video_url": {"url": url_of_file(file)}, "nframes": 2}, "what?"),
                      says("a cat")]},
        {**row, "videos": [{"bytes": None, "path": str(path)}]},
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist([{**row, "videos": [{"bytes": file}]}]), tmp_path / "a.parquet")
    run, found = ImageProcessor(model).read_clip(url_of_file(file, ";nframes=2"))
    text = f"<vision>{AutoTokenizer.from_pretrained(model).decode(run)}</vision>what?"
    for data in (write(tmp_path, rows), tmp_path / "a.parquet"):
        batch = taken(tokenize_file(data, model))
        for index in range(len(batch)):
            assert AutoTokenizer.from_pretrained(model).decode(batch["prompt_token_ids"][index]) == text
            for name, value in found.items():
                assert batch[name][index].equal(value)
    frames = [url(picture(seed=seed)) for seed in range(4)]
    listed = taken(tokenize_file(write(tmp_path, [{"messages": chat, "videos": [frames]}]), model))
    assert listed["video_grid_thw"][0].equal(found["video_grid_thw"])


CHATS = (
    {"messages": [asks("a", SEEN), says("red"), asks("and", SEEN, "?"), says("blue"), asks("1"), says("2")]},
    {"messages": [asks("no picture"), says("none")]},
    {"messages": [asks(SEEN, "x"), says("y")]},
)


def chats(folder):
    """Three chats: of two images around an assistant's turn, of none, and of one."""
    images = [url(picture(size=size, seed=seed)) for seed, size in enumerate(((16, 8), (8, 16), (24, 8)))]
    return write(folder, [{**CHATS[0], "images": images[:2]}, CHATS[1], {**CHATS[2], "images": images[2:]}])


def films(folder):
    """The same with a video for the second image, and the images and videos of the others, of several sizes."""
    videos = [url_of_file(film(size=size, seed=seed)) for seed, size in enumerate(((16, 8), (8, 16)))]
    first, text, last = CHATS
    first = {"messages": [*first["messages"][:2], asks("and", FILM, "?"), *first["messages"][3:]]}
    last = {"messages": [asks(FILM, SEEN, "x"), says("y")]}
    images = [url(picture(size=(16, 8)))]
    given = [{"images": images, "videos": [video]} for video in videos]
    return write(folder, [first | given[0], text, last | given[1]])


def hidden_of(model, row, feeds_last):
    """Hidden states of the positions that score each completion token of a row, by itself and without the engine."""
    prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
    ids = torch.cat([prompt, completion])[None]
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    media = {name: row[name] for name in row.keys() - TEXT if len(row[name])}
    seen = {name: value.double() if "pixel" in name else value for name, value in media.items()}
    if "video_grid_thw" in seen:  # transformers' own have text overlap with the frames of a video
        sizes = {name: value for name, value in seen.items() if "pixel" not in name}
        seen["position_ids"] = rope_positions(model.model, ids[0], kinds[0], sizes)[:, None]
        seen.pop("second_per_grid_ts", None)
    trunk = model.model(ids, mm_token_type_ids=kinds, **seen)
    states = trunk.last_hidden_state[0]
    return states[len(prompt) :] if feeds_last else states[len(prompt) - 1 : -1]


TEXT = {"prompt_token_ids", "completion_token_ids", "loss_mask", "pair_id", "is_chosen"}


def oracle(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return model.eval()


def log_probs(model, batch):
    found = []
    for row in batch.unbind(0):
        logits = model.lm_head(hidden_of(model, row, feeds_last=False))
        found.append(logits.log_softmax(-1).gather(1, row["completion_token_ids"][:, None])[:, 0])
    return found


def built(folder, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=folder, precision=Precision.FLOAT64, **changes))
    engine.initialize()
    return engine


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [chats, films])
def test_sft_of_chats_with_media_is_that_of_transformers(tmp_path, models, family, rows):
    batch = taken(tokenize_file(rows(tmp_path), models[family]))
    mask = torch.cat(batch["loss_mask"].unbind()).double()
    tokenizer = AutoTokenizer.from_pretrained(models[family])
    learned = torch.cat(batch["completion_token_ids"].unbind())[mask.bool()]
    assert tokenizer.decode(learned) == "redblue2<eos>none<eos>y<eos>", "and no token of an image"
    model = oracle(models[family])
    loss = -(torch.cat(log_probs(model, batch)) * mask).sum() / mask.sum()
    loss.backward()
    engine = built(models[family])
    output = engine.forward_backward_batch(batch, sft_loss)
    assert output.num_micro_batches == 1
    assert output.metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in engine.parts.built.scorer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
    engine.close()


PAIR = {"prompt": [asks(SEEN, "colour?")], "chosen": "red", "rejected": "blue"}


def pairs(folder):
    return write(folder, [{**PAIR, "images": [url(picture(size=(8 * size, 8)))]} for size in (1, 2)])


def film_pairs(folder):
    pair = {**PAIR, "prompt": [asks(FILM, "colour?")]}
    return write(folder, [{**pair, "videos": [url_of_file(film(size=(8 * size, 8)))]} for size in (1, 2)])


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [pairs, film_pairs])
def test_dpo_and_reward_losses_of_pairs_are_by_hand(tmp_path, models, family, rows):
    batch = taken(tokenize_pairs(rows(tmp_path), models[family]).columns)
    model = oracle(models[family])
    scores = torch.stack([row.sum() for row in log_probs(model, batch)])
    want = -torch.nn.functional.logsigmoid(0.1 * (scores[::2] - scores[1::2])).mean().item()
    loss = DpoLoss(kind="sigmoid", beta=0.1, label_smoothing=0.0, is_reference_free=True)
    engine = built(models[family])
    assert engine.forward_backward_batch(batch, loss).metrics["loss"] == pytest.approx(want, rel=1e-6)
    engine.close()
    engine = built(models[family], head=Head.REWARD)
    head = engine.parts.built.scorer.model.score.weight
    torch.nn.init.normal_(head, generator=torch.Generator().manual_seed(0))
    ends = torch.stack([hidden_of(model, row, feeds_last=True)[-1] @ head[0] for row in batch.unbind(0)])
    want = -torch.nn.functional.logsigmoid(ends[::2] - ends[1::2]).mean().item()
    assert engine.forward_backward_batch(batch, reward_loss).metrics["loss"] == pytest.approx(want, rel=1e-6)
    engine.close()


def test_kto_and_process_rows_have_their_prompts_images(tmp_path, models):
    model, images = models["qwen2_5_vl"], [url(picture())]
    prompt = {"prompt": PAIR["prompt"], "images": images}
    labelled = tokenize_labelled(
        write(tmp_path, [{**prompt, "completion": "a", "label": label} for label in (True, False)]), model
    )
    steps = tokenize_steps(write(tmp_path, [{**prompt, "steps": ["a", "b"], "labels": [1, 0]}]), model)
    for rows in (labelled, steps):
        batch = taken(rows.columns)
        assert all(len(row) == 16 for row in batch["pixel_values"].unbind())
    assert steps.columns["step_labels"][0].tolist() == [1.0, 0.0]


@pytest.mark.process
def test_a_frozen_tower_has_no_gradients_and_no_adapters(tmp_path, models):
    batch = taken(tokenize_file(chats(tmp_path), models["qwen2_5_vl"]))
    trained = {}
    for name, changes in {"whole": {}, "adapter": {"lora": LoraConfig(rank=2)}}.items():
        for freezes in (False, True):
            engine = built(models["qwen2_5_vl"], freeze_vision=freezes, **changes)
            engine.forward_backward_batch(batch, sft_loss)
            named = engine.parts.built.scorer.model.named_parameters()
            trained[name, freezes] = {each for each, parameter in named if parameter.grad is not None}
            engine.close()
        tower = {each for each in trained[name, False] if "visual" in each}
        assert tower
        assert trained[name, True] == trained[name, False] - tower
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM takes no images"):
        built(str(write_tiny_model(tmp_path / "text")), freeze_vision=True)


def run(main, folder, model, rows, *more, recipe=()):
    """Run a command on 160 rows, and score it on 40 others; returns the last record of its metrics."""
    draw = random.Random(0)
    for name, count in (("train", 160), ("held_out", 40)):
        made = [
            rows(colour, url(picture(COLOURS[colour], seed=draw.random())))
            for colour in draw.choices(list(COLOURS), k=count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    out = folder / "out"
    where = [f"model.path={model}", f"data.path={folder / 'train.jsonl'}", f"eval.path={folder / 'held_out.jsonl'}"]
    assert main([*recipe, *where, f"output_dir={out}", "batch_size=16", "warmup_steps=5", "log_every=5", *more]) == 0
    return json.loads((folder / "out.run" / "metrics.jsonl").read_text().splitlines()[-1])["metrics"], out


def other(colour):
    return next(name for name in COLOURS if name != colour)


def answered(colour, image):
    return {"prompt": [asks(SEEN, "colour?")], "completion": colour, "images": [image]}


def preferred(colour, image):
    return {"prompt": [asks(SEEN, "colour?")], "chosen": colour, "rejected": other(colour), "images": [image]}


COMMANDS = {
    "sft": (sft_main, answered, "sequence_accuracy", "steps=40"),
    "dpo": (dpo_main, preferred, "accuracy", "steps=30"),
    "rm": (rm_main, preferred, "accuracy", "steps=30"),
}


@pytest.mark.process
@pytest.mark.parametrize("name", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "rm"))])
def test_a_command_learns_the_colour_of_a_picture(tmp_path, models, name):
    main, rows, metric, steps = COMMANDS[name]
    record, _ = run(main, tmp_path, models["qwen2_5_vl"], rows, "lr=3e-3", steps)
    assert record[f"held_out_{metric}"] > 0.9


@pytest.mark.process
def test_lora_of_a_recipe_leaves_the_tower_as_it_was(tmp_path, models):
    main, rows, metric, _ = COMMANDS["sft"]
    more = ["steps=40", "lr=1e-2", "precision=float32"]
    record, out = run(main, tmp_path, models["qwen3_vl"], rows, *more, recipe=["sft-vlm"])
    before, after = load_weights(models["qwen3_vl"]), load_weights(out)
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert not any("visual" in name for name in changed)
    assert record[f"held_out_{metric}"] > 0.9


BAD = {
    "cut": ([url(picture()[:60])], [asks(SEEN)], "image 'data:image/png.*cannot be read: "),
    "text": ([url(b"no picture")], [asks(SEEN)], "image .* cannot be read: it is in no format that Pillow knows"),
    "long": ([url(picture(size=(900, 2)))], [asks(SEEN)], "image .* cannot be read: ValueError: absolute aspect ratio"),
    "absent": (["no/such.png"], [asks(SEEN)], "image 'no/such.png' is not a data URL, bytes or an image file here"),
    "few": ([url(picture())], [asks(SEEN, SEEN)], "the messages have more places for images than the 1 in images"),
    "many": ([url(picture())] * 2, [asks(SEEN)], "has 2 images, and its messages places for 1"),
    "spelled": ([], [asks("<image>")], r"has 0 images and 1 placeholders for them \(token 53\)"),
    "kind": ("a.png", [asks(SEEN)], "images is a str; wanted a list of images"),
    "sound": ([], [asks({"type": "audio"})], "has a sound; training programs take images and videos, and rl-train"),
    "said": ([url(picture())], [{"role": "assistant", "content": [SEEN]}, asks("b")], "an assistant's message has an"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_picture_names_file_and_row(tmp_path, models, case):
    images, chat, sentence = BAD[case]
    rows = [{"messages": [asks("a"), says("b")]}, {"messages": [*chat, says("c")], "images": images}]
    with pytest.raises(DataError, match=f"rows.jsonl: row 2:? {sentence}"):
        tokenize_file(write(tmp_path, rows), models["qwen2_5_vl"])


BAD_FILMS = {
    "cut": (
        [url_of_file(film()[:600])],
        FILM,
        "video 'data:video/mp4;base64,.*cannot be read: ValueError: a video of 600",
    ),
    "text": (
        [url_of_file(b"no film")],
        FILM,
        "video .* cannot be read: ValueError: a video of 7 bytes cannot be decoded",
    ),
    "absent": (["no/such.mp4"], FILM, "video 'no/such.mp4' is not a data URL, bytes, a video file here or a list of"),
    "frame": ([[url(picture())]], FILM, "video .* cannot be read: ValueError: a video has 1 frames, and at least 2"),
    "rate": (
        [url_of_file(film())],
        {**FILM, "fps": -1},
        "video .* cannot be read: ValueError: fps=-1.0 and nframes=None",
    ),
    "few": ([], FILM, "the messages have more places for videos than the 0 in videos"),
    "kind": ("a.mp4", FILM, "videos is a str; wanted a list of videos"),
}


@pytest.mark.parametrize("case", BAD_FILMS)
def test_a_bad_video_names_file_and_row(tmp_path, models, case):
    videos, part, sentence = BAD_FILMS[case]
    rows = [{"messages": [asks("a"), says("b")]}, {"messages": [asks(part), says("c")], "videos": videos}]
    with pytest.raises(DataError, match=f"rows.jsonl: row 2:? {sentence}"):
        tokenize_file(write(tmp_path, rows), models["qwen2_5_vl"])


@pytest.mark.process
def test_sft_learns_the_colour_of_a_film_in_a_file(tmp_path, models):
    def filmed(colour, image):
        path = tmp_path / f"{len(list(tmp_path.glob('*.mp4')))}.mp4"
        path.write_bytes(film(COLOURS[colour], seed=len(image)))
        return {"prompt": [asks(FILM, "colour?")], "completion": colour, "videos": [str(path)]}

    record, _ = run(sft_main, tmp_path, models["qwen3_vl"], filmed, "lr=3e-3", "steps=40")
    assert record["held_out_sequence_accuracy"] > 0.9


@pytest.mark.process
def test_images_need_a_model_that_takes_them(tmp_path, models, capsys):
    text = str(write_tiny_model(tmp_path / "text"))
    where = [f"data.path={pairs(tmp_path)}", f"output_dir={tmp_path / 'out'}"]
    assert dpo_main([f"model.path={text}", *where]) == 2
    assert "row 1 has images or videos, and the model in" in capsys.readouterr().err
    paths = [f"{name}.path={models['qwen2_5_vl']}" for name in ("model", "teacher")]
    for part, given in ((SEEN, {"images": [url(picture())]}), (FILM, {"videos": [url_of_file(film())]})):
        where[0] = f"data.path={write(tmp_path, [{'messages': [asks(part), says('a')], **given}])}"
        assert distill_main([*paths, *where]) == 2
        assert "has images or videos, which rl-distill does not show to a teacher" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
