"""Formulas of peers that no small package has, restated from reading their source, or the paper where there is none.

Plain loops over one completion, one group or one token at a time, in float64: slow, and nothing like our kernels.
Legend: `rows` is a list of (n,) tensors, a completion each; `groups` a list of ints, a prompt each.

| name | source |
|---|---|
| `gpg` | the authors' trainer, `undyingjoker/GPG_OPENRS` at 01de699, `open-r1/src/open_r1/gpg_trainer.py` |
| `remax` | the authors' trainer, `liziniu/ReMax` at 536ba49, `step3_rlhf_finetuning/remax_trainer.py` |
| `gdpo` | `NVIDIA-NeMo/RL` at 7ea279a, `nemo_rl/algorithms/advantage_estimator.py` |
| `mis` | `THUDM/slime` at 624b824, `examples/train_infer_mismatch_helper/mis.py` |
| `dro` | the documentation of Tinker's loss `dro` |
| `vtrace` | equations 1 and remark 2 of arXiv 1802.01561 |
| `opo` | the length-weighted baseline of arXiv 2505.23585 |
| `passk` | arXiv 2503.19595: a group counts by its best, whose leave-one-out baseline is the second best |
| `maxrl` | the authors' `tajwarfahim/maxrl` at 7db6bb9, `verl/trainer/ppo/core_algos.py` |
| `gigpo` | arXiv 2505.10978, equations 3 and 5 to 8, without the deviation |
| `ce_gppo` | the authors' README, `Kwai-Klear/CE-GPPO` at 10558fe |
| `topr` | arXiv 2503.14286, the canonical form: positives as they are, negatives by their ratio within 0 and 1 |
| `m2po` | arXiv 2510.01161, algorithm 1 and equation 5 (the code of its authors clips instead of masking) |
| `luffy` | arXiv 2504.14945 with p / (p + 0.1), and the authors' `off_policy_reshape=p_div_p_0.1` |
| `token_baseline` | arXiv 2602.07078: the baseline of least variance, one position of one group at a time |
"""

from __future__ import annotations

import math
from statistics import fmean, stdev


def members(groups):
    """Numbers of the completions of each prompt."""
    found = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    return list(found.values())


def less_mean(rewards, groups):
    """Each completion's reward less the mean of its prompt's."""
    found = [0.0] * len(rewards)
    for mine in members(groups):
        mean = fmean(rewards[i] for i in mine)
        for i in mine:
            found[i] = rewards[i] - mean
    return found


def gpg(rewards, groups):
    """Less the mean, over the share of prompts whose rewards differ (there of the loss; `alpha` of the paper)."""
    mine = members(groups)
    share = fmean(len({rewards[i] for i in group}) > 1 for group in mine)
    return [value / share if share else 0.0 for value in less_mean(rewards, groups)]


def remax(rewards, greedy, masks, gamma):
    """A reward that is discounted from the last model token on, less the greedy completion's."""
    found = []
    for reward, baseline, mask in zip(rewards, greedy, masks, strict=True):
        line, value = [0.0] * len(mask), reward
        for t in reversed(range(len(mask))):
            if mask[t]:
                line[t] = value - baseline
                value *= gamma
        found.append(line)
    return found


def gdpo(components, weights, groups):
    """Each part in units of its prompt's deviation, weighed and added; then of zero mean and unit deviation."""
    total = [0.0] * len(groups)
    for part, weight in zip(components, weights, strict=True):
        centered = less_mean(part, groups)
        for mine in members(groups):
            deviation = stdev(part[i] for i in mine)
            for i in mine:
                total[i] += weight * centered[i] / (deviation + 1e-6)
    mean, deviation = fmean(total), stdev(total)
    return [(value - mean) / deviation for value in total]


def opo(rewards, groups, counts):
    """Less the mean of the prompt's rewards, in which each weighs as many as its tokens."""
    found = [0.0] * len(rewards)
    for mine in members(groups):
        baseline = sum(counts[i] * rewards[i] for i in mine) / sum(counts[i] for i in mine)
        for i in mine:
            found[i] = rewards[i] - baseline
    return found


def passk(rewards, groups):
    """What a prompt's best reward would lose without its completion, over the deviation; 0 for the others."""
    found = [0.0] * len(rewards)
    for mine in members(groups):
        for i in mine:
            without = max(rewards[j] for j in mine if j != i)
            gain = max(rewards[j] for j in mine) - without
            found[i] = gain / (stdev(rewards[j] for j in mine) + 1e-6)
    return found


def vtrace(rewards, values, ratios, gamma, lam):
    """Targets v_s as the sum of corrected differences, and advantages rho_s (r_s + gamma v_{s+1} - V_s)."""
    n = len(rewards)
    rho = [min(1.0, ratio) for ratio in ratios]
    after = [*values[1:], 0.0]
    target = [
        values[s]
        + sum(
            gamma ** (t - s)
            * math.prod(lam * min(1.0, ratios[i]) for i in range(s, t))
            * rho[t]
            * (rewards[t] + gamma * after[t] - values[t])
            for t in range(s, n)
        )
        for s in range(n)
    ]
    following = [*target[1:], 0.0]
    return target, [rho[s] * (rewards[s] + gamma * following[s] - values[s]) for s in range(n)]


def token_baseline(rewards, groups, logprobs, sum_pi_squared, weights):
    """Reward less, at each position, sum_i R_i W_i / sum_i W_i over the prompt's completions that reach it.

    W_i is the sum up to there of w^2 (1 - 2 pi + sum_v pi_v^2), the squared norm of the score of a softmax. A
    completion that is alone at a position has no baseline there.
    """
    found = [[0.0] * len(line) for line in logprobs]
    for mine in members(groups):
        for t in range(max(len(logprobs[i]) for i in mine)):
            there = [i for i in mine if len(logprobs[i]) > t]
            energy = {
                i: sum(
                    weights[i][s] ** 2 * (1 - 2 * math.exp(logprobs[i][s]) + sum_pi_squared[i][s]) for s in range(t + 1)
                )
                for i in there
            }
            total = sum(energy.values())
            baseline = sum(rewards[i] * energy[i] for i in there) / total if len(there) > 1 and total else 0.0
            for i in there:
                found[i][t] = rewards[i] - baseline
    return found


def mis(train, rollout, mask, *, level, low, high, mode):
    """(weights, mask) of one completion by slime's importance and rejection sampling."""
    logs = [(a - b) * m for a, b, m in zip(train, rollout, mask, strict=True)]
    if level == "sequence":
        logs = [sum(logs)] * len(logs)
    elif level == "geometric":
        logs = [sum(logs) / sum(mask)] * len(logs)
    ratios = [math.exp(x) for x in logs]
    if mode == "truncate":
        return [min(r, high) * m for r, m in zip(ratios, mask, strict=True)], mask
    return ratios, [m * (low <= r <= high) for r, m in zip(ratios, mask, strict=True)]


def dro(logprobs, sampled, advantages, mask, beta):
    """The sum of -(log pi A - beta / 2 (log pi - log mu)^2) over model tokens, of which autograd takes the gradient."""
    terms = logprobs * advantages - beta / 2 * (logprobs - sampled) ** 2
    return -(terms * mask).sum()


def maxrl(rewards, groups):
    """Less the mean of the prompt's rewards, in units of it."""
    centered = less_mean(rewards, groups)
    found = [0.0] * len(rewards)
    for mine in members(groups):
        mean = fmean(rewards[i] for i in mine)
        for i in mine:
            found[i] = centered[i] / (mean + 1e-6)
    return found


def gigpo(turns, groups, gamma):
    """By completion, its turns' advantages; a turn is (state, reward), and a completion's reward their sum."""
    episodes = less_mean([sum(reward for _, reward in line) for line in turns], groups)
    to_go = [[sum(gamma**n * r for n, (_, r) in enumerate(line[t:])) for t in range(len(line))] for line in turns]
    found = []
    for i, line in enumerate(turns):
        own = []
        for t, (state, _) in enumerate(line):
            peers = [
                to_go[j][s]
                for j, other in enumerate(turns)
                for s, (theirs, _) in enumerate(other)
                if groups[j] == groups[i] and theirs == state
            ]
            own.append(episodes[i] + to_go[i][t] - fmean(peers))
        found.append(own)
    return found


def ce_gppo(ratio, advantage, low, high, beta_low, beta_high):
    """(loss, its derivative by the log-prob) of a token."""
    if ratio < 1 - low and advantage < 0:
        value = -beta_low * (1 - low) * advantage
    elif ratio > 1 + high and advantage > 0:
        value = -beta_high * (1 + high) * advantage
    else:
        value = -ratio * advantage
    return value, value


def topr(logs, advantage):
    """Derivative of the loss by each log-prob of a completion whose log ratios these are."""
    weight = 1.0 if advantage >= 0 else min(max(math.exp(sum(logs)), 0.0), 1.0)
    return [-weight * advantage] * len(logs)


def m2po(logs, advantages, most):
    """Numbers of the tokens that are left out, of the log ratios and advantages of a batch."""
    region = [i for i, (x, a) in enumerate(zip(logs, advantages, strict=True)) if (a > 0 < x) or (a < 0 > x)]
    out = set()
    while region and fmean(logs[i] ** 2 for i in region) > most:
        worst = max(region, key=lambda i: logs[i] ** 2)
        out.add(worst)
        region.remove(worst)
    return out


def luffy(logprob, advantage, gamma):
    """(loss, its derivative by the log-prob) of a token that was given."""
    p = math.exp(logprob)
    return -advantage * p / (p + gamma), -advantage * gamma * p / (p + gamma) ** 2
