"""Messages between ranks, and which rank gets which datums."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

import rlkit
from rlkit.backends.local.distributed.losses import Losses
from rlkit.backends.local.distributed.ranks import shares_of
from rlkit.backends.local.distributed.server import Listener, knock
from rlkit.backends.local.distributed.wire import Connection, Message, Peer, RemoteError, packed_data, unpacked_data
from rlkit.backends.trainer import Worker
from rlkit.losses.prepare import prepare


@pytest.fixture
def ends():
    pair = [Connection(link) for link in _tcp_pair()]
    yield pair
    for end in pair:
        end.close()


def _tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


def test_messages_arrive_as_they_were(ends):
    """Kind, fields and arrays of every shape, empty ones too."""
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(0, np.int64), np.array(2.5), np.array([True])]
    big = np.random.default_rng(0).normal(size=(400, 1000))  # more than a socket takes at once
    sender = threading.Thread(target=ends[0].send, args=(Message("run", {"a": [1, None, "ü"]}, [*arrays, big]),))
    sender.start()
    message = ends[1].receive()
    sender.join()
    assert (message.kind, message.fields) == ("run", {"a": [1, None, "ü"]})
    for sent, got in zip([*arrays, big], message.arrays, strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("head", [b'["x",{},[["|O8",[3]]]]', b'["x",{},[["<f4",[-1]]]]', b"no JSON", b"[1]"])
def test_what_is_no_message_is_refused(head):
    """Objects, negative sizes and other text end the connection with a ValueError."""
    here, there = _tcp_pair()
    with here:
        here.sendall(len(head).to_bytes(4, "big") + head)
        end = Connection(there)
        with pytest.raises(ValueError):  # json's is one, too
            end.receive()
        end.close()


def _head(text):
    return len(text).to_bytes(4, "big") + text


FIRST = {  # what a stranger says, in place of the token
    "nothing": b"",
    "half a length": b"\0\0",
    "a long head": (1 << 20).to_bytes(4, "big"),
    "no JSON": _head(b"x"),
    "no message": _head(b"5"),
    "no fields": _head(b'["hello",1,[]]'),
    "no token": _head(b'["hello",{"rank":1},[]]'),
    "another token": _head(b'["hello",{"rank":1,"token":"x"},[]]'),
    "a token that is no text": _head(b'["hello",{"rank":1,"token":"\\ud800"},[]]'),
    "an array": _head(b'["hello",{"rank":1,"token":"x"},[["<f8",[1000000000000]]]]'),
}


def test_strangers_keep_no_rank_out():
    """However many are silent or say what is no greeting, before a rank comes and shows the token."""
    listener = Listener("127.0.0.1")
    address = listener.address
    strangers = [socket.create_connection((address["host"], address["port"])) for _ in FIRST]
    for stranger, said in zip(strangers, FIRST.values(), strict=True):
        stranger.sendall(said)
    ranks = [knock(None, rank, address) for rank in (2, 1)]
    found = listener.accept(3, 5.0, lambda: None)
    listener.close()
    for connection, rank in zip(found, reversed(ranks), strict=True):
        rank.send(Message("here", {"number": ranks.index(rank)}))
        assert connection.receive().fields == {"number": ranks.index(rank)}
    for end in (*found, *ranks, *strangers):
        end.close()


def test_datums_arrive_without_what_stays(ends):
    """Tokens, masks, temperatures and targets travel; advantages stay."""
    data = [
        rlkit.Datum([5, 6, 7], [0, 1, 1], {"advantages": [1.0, 2.0]}, temperature=0.7),
        rlkit.Datum([5, 6], [0, 0], {"target_tokens": np.array([[1, -1], [2, 3]])}),
    ]
    ends[0].send(Message("run", *packed_data(data)))
    message = ends[1].receive()
    got = unpacked_data(message.fields, message.arrays)
    for a, b in zip(data, got, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.mask.tolist() == b.mask.tolist()
        assert a.temperature == b.temperature
    assert not got[0].inputs
    assert got[1].inputs["target_tokens"].tolist() == data[1].inputs["target_tokens"].tolist()


def test_peers_ask_and_answer():
    """Both may ask, errors come back as text, and what waits for a lost one raises."""
    here, there = (Connection(link) for link in _tcp_pair())
    lost = threading.Event()

    def answers(message):
        raise KeyError(message.kind)

    one = Peer(here, answers, lambda error: lost.set())
    two = Peer(there, answers, lambda error: None)
    for peer in (one, two):
        peer.start()
    for peer in (one, two):
        with pytest.raises(RemoteError, match="KeyError: 'what'"):
            peer.call("what", {}).result(timeout=30)
    two.close()
    assert lost.wait(30)
    one.fail(rlkit.RankLost("gone"))
    with pytest.raises(rlkit.RankLost):
        one.call("what", {}).result(timeout=30)
    one.close()


@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_datum_is_somebodys(share, pairs, ranks):
    """Each once, pairs together, and no rank has more than its part and one unit."""
    draw = np.random.default_rng(ranks)
    data = []
    for _ in range(20):
        n = int(draw.integers(2, 60))
        data.append(rlkit.Datum(draw.integers(0, 99, n), np.arange(n) >= (1 if pairs else draw.integers(1, n + 1))))
    shares = shares_of(data, ranks, pairs=pairs, share=share)
    assert sorted(i for s in shares for i in s) == list(range(20))
    sizes = [sum(int(np.flatnonzero(data[i].mask)[-1]) for i in s if data[i].mask.any()) for s in shares]
    assert max(sizes) <= sum(sizes) / ranks + (120 if pairs else 60)
    if pairs:
        assert all(s[k + 1] == s[k] + 1 for s in shares for k in range(0, len(s), 2))


def test_groups_are_cut_only_where_it_pays():
    """Two groups of equal size go to two ranks whole; one group alone is cut, and its prompt computed twice."""
    draw = np.random.default_rng(0)
    begins = draw.integers(0, 99, (2, 30))
    groups = [[rlkit.Datum.supervised(begin, draw.integers(0, 99, 9)) for _ in range(4)] for begin in begins]
    mixed = [groups[k % 2][k // 2] for k in range(8)]
    assert sorted(map(tuple, shares_of(mixed, 2, pairs=False, share=1))) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [len(s) for s in shares_of(groups[0], 2, pairs=False, share=1)] == [2, 2]
    long = [rlkit.Datum.supervised(np.arange(500) % 99, [k]) for k in range(4)]
    assert sorted(len(s) for s in shares_of(long, 2, pairs=False, share=1)) == [0, 4]


@pytest.fixture
def losses():
    """``losses(function)``: a loss of one datum on each of two ranks; and the logprobs of one."""
    torch = pytest.importorskip("torch")
    worker = Worker("losses")
    data = [rlkit.Datum([5, k], [0, 1]) for k in (6, 7)]
    yield lambda function: (Losses(prepare(function), data, [[0], [1]], worker), [torch.zeros(1)])
    worker.close()


@pytest.mark.parametrize("outcome", ["value", "error"])
def test_a_loss_that_is_broken_off_while_it_is_computed(losses, outcome):
    """Nobody waits for it any longer, what it gives is of no use, and the next call's is computed behind it."""
    began, release = threading.Event(), threading.Event()

    def slow(logprobs):
        began.set()
        release.wait(60)
        if outcome == "error":
            raise ValueError("too late")
        return -logprobs.sum()

    call, logprobs = losses(slow)
    answers = [call.ask(rank, [0], logprobs, None) for rank in (0, 1)]
    began.wait(60)
    call.abort(rlkit.RankLost("rank 1 is gone"))
    for answer in [*answers, call.ask(0, [0], logprobs, None)]:
        with pytest.raises(rlkit.RankLost, match="rank 1 is gone"):
            answer.result(timeout=60)
    following, _ = losses(lambda logprobs: logprobs.sum())
    answer = following.ask(1, [0], logprobs, None)
    assert not answer.done()
    release.set()
    assert answer.result(timeout=60).driver[0].tolist() == [1.0]
    assert (len(following.parts), type(call.error)) == (1, rlkit.RankLost)


def test_a_loss_that_raises_is_raised_by_all(losses):
    """Also where it wants all logprobs, by the rank that asked before."""

    @rlkit.losses.loss(level="batch")
    def fails(logprobs):
        raise ValueError(f"of {len(logprobs)}")

    call, logprobs = losses(fails)
    for answer in [call.ask(rank, [0], logprobs, None) for rank in (1, 0)]:
        with pytest.raises(ValueError, match="of 2"):
            answer.result(timeout=60)
    assert isinstance(call.error, ValueError)
