import asyncio
import threading

import pytest

from systems.loop.clock import NothingScheduled, begin_time, now_ns, run_live, run_virtual


def test_time_jumps_to_the_next_timer_exactly() -> None:
    async def main() -> int:
        await asyncio.sleep(3600.000000001)
        return now_ns()

    assert run_virtual(main()) == 3_600_000_000_001


def test_timers_of_one_moment_run_in_the_order_they_were_set() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for index in range(100):
            loop.call_at(1.0, order.append, index)
        await asyncio.sleep(2)

    run_virtual(main())
    assert order == list(range(100))


def test_what_is_ready_runs_before_a_timer_of_the_same_moment() -> None:
    order: list[str] = []

    async def chain(depth: int) -> None:
        for _ in range(depth):
            await asyncio.sleep(0)
        order.append("ready")

    async def main() -> None:
        asyncio.get_running_loop().call_later(0, order.append, "timer")
        await chain(5)
        await asyncio.sleep(1)

    run_virtual(main())
    assert order == ["ready", "timer"]


def test_a_hang_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingScheduled):
        run_virtual(main())


def test_cancelled_timers_neither_fire_nor_hold_the_clock() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(5000):
            loop.call_later(50, pytest.fail, "a cancelled timer fired").cancel()
        await asyncio.sleep(1)
        return now_ns()

    assert run_virtual(main()) == 1_000_000_000


def test_an_error_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())


def test_timeout_and_task_group_work_unchanged() -> None:
    async def main() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(3))
            group.create_task(asyncio.sleep(7))
        return now_ns()

    assert run_virtual(main()) == 12_000_000_000


def test_threads_and_executors_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no executors"):
            await asyncio.to_thread(print)
        caught: list[BaseException] = []

        def other() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                caught.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "other threads" in str(caught[0])

    run_virtual(main())


def test_real_time_starts_again_after_preparation() -> None:
    async def main() -> tuple[int, int, int]:
        await asyncio.sleep(0.05)
        prepared = now_ns()
        begin_time()
        began = now_ns()
        await asyncio.sleep(0.02)
        return prepared, began, now_ns()

    prepared, began, ended = run_live(main())
    assert prepared >= 50_000_000
    assert began < prepared
    assert ended - began >= 20_000_000


def test_real_time_does_not_start_again_under_a_timer() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, print)
        begin_time()

    with pytest.raises(RuntimeError, match="the clock starts again"):
        run_live(main())


def test_virtual_time_has_no_preparation() -> None:
    async def main() -> int:
        await asyncio.sleep(1)
        begin_time()
        return now_ns()

    assert run_virtual(main()) == 1_000_000_000


def test_an_error_in_a_callback_ends_a_real_run_too() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0.05)

    with pytest.raises(ZeroDivisionError):
        run_live(main())
