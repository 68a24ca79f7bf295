"""The deadline board, read while it is written."""

import threading

from longstep_bindings.envs.board import Board, new_board_file


def test_what_is_read_beside_a_writer_is_a_deadline_that_was_written():
    board = Board(new_board_file())
    line, stop = board.new_line(owner=1), threading.Event()

    def write():
        while not stop.is_set():
            line.begin(2, 3.0)
            line.end()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [entry for _ in range(3000) for entry in board.running()]
    finally:
        stop.set()
        writer.join()
    assert set(seen) <= {(3.0, 1, 2)}
    board.close()
