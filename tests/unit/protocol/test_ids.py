import re

from protocol.ids import RequestKey, Role, WorkerRef, new_epoch, new_request_id


def test_request_ids_are_128_random_bits():
    ids = {new_request_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(re.fullmatch(r"[0-9a-f]{32}", request_id) for request_id in ids)


def test_epochs_fit_a_signed_64_bit_integer_and_do_not_repeat():
    epochs = {new_epoch() for _ in range(500)}
    assert len(epochs) == 500
    assert all(0 <= epoch < 2**62 for epoch in epochs)


def test_attempts_of_one_request_are_different_keys():
    first, second = RequestKey("abc"), RequestKey("abc", 1)
    assert first != second
    assert len({first, second, RequestKey("abc", 0)}) == 2
    assert (str(first), str(second)) == ("abc/0", "abc/1")


def test_a_restarted_worker_is_another_worker():
    def ref(epoch):
        return WorkerRef(worker_id="decode-0", epoch=epoch, role=Role.DECODE, address="h:1")

    assert ref(1) != ref(2)
    assert hash(ref(1)) == hash(ref(1))
