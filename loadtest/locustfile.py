"""Entry point for locust: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.

Locust loads it by path, outside its package, so it imports the other modules by name.
"""

from importlib import import_module

_users = import_module("loadtest.users")

ChatOverSSE = _users.ChatOverSSE
ChatOverWebSocket = _users.ChatOverWebSocket
