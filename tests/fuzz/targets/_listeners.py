"""Real listeners, served on a thread of this process: the fuzzer sees the code of their handlers."""

import asyncio
import http.client
import threading


class Served:
    """An HTTP server that `start`, a coroutine function, starts and returns the base URL of."""

    def __init__(self, start):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        url = asyncio.run_coroutine_threadsafe(start(), self._loop).result(60)
        self._address = url.removeprefix("http://").split("/")[0]
        self._connection = http.client.HTTPConnection(self._address, timeout=8)

    def post(self, path, body):
        """Status and body of the answer; the connection stays open where it can."""
        try:
            self._connection.request("POST", path, body=body, headers={"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            self._connection.close()
            raise
