"""What the fakes of inference servers have in common: an endpoint until SIGTERM, and spans of weight versions."""

import asyncio
import signal

from aiohttp import web


async def serve(fake, start, site, *where):
    """Serve `fake.routes()` until SIGTERM, at a site of aiohttp such as `web.TCPSite`; then stop `fake.server`."""
    await start()
    app = web.Application()
    app.add_routes(fake.routes())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await site(runner, *where).start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    await over.wait()
    await runner.cleanup()
    await fake.server.stop()


def version_spans(versions):
    """Contiguous spans of equal versions, as vLLM and SGLang tell them."""
    spans = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans
