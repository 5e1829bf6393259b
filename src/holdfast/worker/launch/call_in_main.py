"""The main module of a worker that calls a function (function_call.py), as `python -m` would run it."""

from holdfast.worker.launch import function_call

if __name__ == "__main__":
    function_call.main()
