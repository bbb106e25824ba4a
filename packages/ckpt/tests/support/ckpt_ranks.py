"""What a trainer decides for its ranks."""

import asyncio

from rl_ckpt import join_digest


async def decide(senders, shares, version):
    """Commit a version that all ranks have staged, or abort it where one has failed: reports, or the errors."""
    if errors := [share for share in shares if isinstance(share, BaseException)]:
        await asyncio.gather(*(sender.abort(str(errors[0])) for sender in senders))
        return errors
    digest = join_digest(shares)
    return [await sender.commit(digest, version) for sender in senders]
