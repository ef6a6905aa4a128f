from __future__ import annotations

import json
import socket
import stat
import threading
import time
from pathlib import Path

from mmctl.agent.channel import Channel, Command
from mmctl.engine.records import Event
from mmctl.engine.sources.agent import connect, records


def test_records_out_commands_in_and_a_clean_end(tmp_path: Path) -> None:
    with Channel(tmp_path / "agent") as channel:
        assert stat.S_IMODE((tmp_path / "agent").stat().st_mode) == 0o600
        stream = records(connect(str(tmp_path / "agent")), threading.Event())
        assert channel.subscribed.wait(5)
        sent = [Event(ts_ns=i, what="trip") for i in range(5000)]
        for record in sent:
            channel.publish(record)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "agent"))
            client.sendall(b'{"id":"a:1","action":"respond","args":{"order":["compact"]}}\n')
            client.sendall(b"nonsense\n")
            assert "error" in json.loads(client.makefile().readline())
            command = channel.commands.get(timeout=5)
        assert command == Command("respond", "a:1", {"order": ["compact"]})
        closing = threading.Thread(target=channel.close)
        closing.start()
        assert list(stream) == sent
        closing.join()
    assert not (tmp_path / "agent").exists()


def test_one_subscriber_that_goes_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with Channel(tmp_path / "agent") as channel:
        gone = connect(str(tmp_path / "agent"))
        stream = records(connect(str(tmp_path / "agent")), threading.Event())
        while len(channel._subscribers) < 2:
            time.sleep(0.01)
        gone.close()
        for i in range(100):
            channel.publish(Event(ts_ns=i, what="trip"))
        assert [next(stream).ts_ns for _ in range(100)] == list(range(100))
