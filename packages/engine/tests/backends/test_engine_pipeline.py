"""The pipeline's schedule: every rank's turns can be taken in their order, and pieces shorten the wait."""

import pytest

from rl_engine.backends.megatron.layout import schedule
from rl_engine.backends.megatron.weights import split_layers


def play(count, num_stages, num_chunks, *, has_backward):
    """Let every rank take its turns as soon as what it waits for has come, in the order in which it was sent.

    Returns the time at which the last turn ends, a pass through all pieces of one rank taking 1 (2 backward).
    """
    turns = [
        schedule(count, stage=stage, num_stages=num_stages, num_chunks=num_chunks, has_backward=has_backward)
        for stage in range(num_stages)
    ]
    wires, clock, place = {}, [0.0] * num_stages, [0] * num_stages
    alive = [[] for _ in range(num_stages)]
    last = num_stages * num_chunks - 1
    while any(place[stage] < len(turns[stage]) for stage in range(num_stages)):
        is_stuck = True
        for stage in range(num_stages):
            while place[stage] < len(turns[stage]):
                turn = turns[stage][place[stage]]
                piece = turn.chunk * num_stages + stage
                source = piece - 1 if turn.is_forward else piece + 1
                # one queue for each direction between two ranks, and for each of the groups that they talk in
                wire = (source % num_stages, stage, turn.is_forward, abs(source % num_stages - stage) > 1)
                starts = clock[stage]
                if (source >= 0) if turn.is_forward else (source <= last):
                    if not wires.get(wire):
                        break
                    (sent, index), sent_at = wires[wire].pop(0)
                    assert (sent, index) == (source, turn.index)
                    starts = max(starts, sent_at)
                if turn.is_forward:
                    alive[stage].append((turn.chunk, turn.index))
                else:
                    alive[stage].remove((turn.chunk, turn.index))
                clock[stage] = starts + (1.0 if turn.is_forward else 2.0) / num_chunks
                target = piece + 1 if turn.is_forward else piece - 1
                out = (stage, target % num_stages, turn.is_forward, abs(target % num_stages - stage) > 1)
                if 0 <= target <= last:
                    wires.setdefault(out, []).append(((piece, turn.index), clock[stage]))
                place[stage] += 1
                is_stuck = False
        assert not is_stuck, "every rank waits for another"
    assert not any(wires.values())
    assert not (has_backward and any(alive))
    assert all(len(mine) == count * num_chunks * (2 if has_backward else 1) for mine in turns)
    return max(clock)


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_no_rank_waits_for_ever(num_stages, has_backward):
    for count in range(1, 10):
        play(count, num_stages, 1, has_backward=has_backward)
    if num_stages == 1:
        return
    for num_chunks in (2, 3):
        for groups in range(1, 5):
            play(groups * num_stages, num_stages, num_chunks, has_backward=has_backward)


def test_pieces_shorten_the_wait():
    assert play(8, 4, 1, has_backward=True) == 8 * 3 + 3 * 3  # three quarters of the ranks wait for three passes
    assert play(8, 4, 2, has_backward=True) == 8 * 3 + 3 * 3 / 2


def test_the_first_and_the_last_stage_have_fewer_layers_where_they_do_not_divide():
    assert split_layers(94, 8, 1) == [11, 12, 12, 12, 12, 12, 12, 11]  # Qwen3-235B
    assert split_layers(61, 16, 1) == [2, *[4] * 14, 3]  # DeepSeek-V3
    assert split_layers(3, 2, 1) == [1, 2]
    assert split_layers(8, 2, 2) == [2, 2, 2, 2]
    assert min(split_layers(2, 3, 1)) == 0  # too few: refused
