"""The guards against each attack of docs/SECURITY.md, as mutants that lack them.

A table for mutants.py: each entry removes one guard, or restores the defect that it prevents, and
names the tests of the attack's row that must then fail. Data only.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """The product without one of its guards.

    Attributes:
      attack: the row of docs/SECURITY.md.
      file: the product's file.
      guard: text that occurs in it exactly once.
      instead: the text that replaces it.
      test: FILE::TEST below tests/, which fails without the guard.
    """

    attack: str
    file: str
    guard: str
    instead: str
    test: str

    def __str__(self) -> str:
        return f"{self.attack}: {self.file}: {' '.join(self.guard.split())[:60]}"


_HEAD_GUARD: Final = "server/edge/http.py"
_JSON: Final = "server/api/json_body.py"
_DOOR: Final = "server/test_door.py"
_TURNS: Final = "server/test_turns.py"
_KEYS: Final = "security/test_keys.py"
_TENANCY: Final = "server/test_tenancy.py"
_AUDIT_LOG: Final = "ops/audit"
_REGISTRY: Final = "store/registry"
_SIGNATURES: Final = "store/test_signatures.py"
_PRIVATE: Final = "triolet/test_private_files.py"
_HEADS: Final = (
    "server/edge/test_head_guard.py::test_heads_that_two_parsers_could_read_differently_are_refused"
)
_ATTACKED: Final = "security/test_links_under_attack.py"
_LINKS: Final = "transport/test_links.py"
_HTTP: Final = "server/edge/test_http_traps.py"
_MASKS: Final = "engine/test_constraints.py"
_WS: Final = "server/edge/test_websocket_traps.py"
_ODD_JSON: Final = "server/api/test_json_body.py::test_what_json_takes_and_we_do_not_is_named"
_BAD: Final = "server/api/test_bad_requests.py"
_BOMBS: Final = "security/test_bombs.py::test_bombs_reach_no_worker"
_BOUNDS: Final = (
    "security/test_bombs.py::test_as_many_as_the_bound_are_taken_and_one_more_is_refused"
)

_LINEAR: Final = "server/text/test_linear_template.py"
_NOT_LINEAR: Final = f"{_LINEAR}::test_what_is_not_known_to_be_cheap_is_not_linear"
_ISOLATED: Final = "server/text/test_isolated.py"
_BOUNDED: Final = "store/model_dir/bounded.py"
_STRANGERS: Final = "store/test_bounded_files.py"
_CHUNKS: Final = "server/edge/test_chunked_bodies.py"
_CROWDS: Final = "server/edge/test_crowds.py"
_TYPES: Final = "server/api/test_content_types.py"
_ADDRESS: Final = "server/edge/test_client_address.py"
_TABLE: Final = "server/edge/connection_table.py"

MUTANTS: Final = (
    Mutant("A1", "transport/codec.py", "return _DECODER.decode(data)",
           'return __import__("pickle").loads(data)',
           "security/test_transport.py::test_a_pickle_is_no_frame_and_runs_nothing"),
    Mutant("A1", "transport/codec.py", "import msgspec\n", "import pickle\n\nimport msgspec\n",
           "house/test_layout.py::test_nothing_unsafe_is_ever_loaded"),
    Mutant("A2", "transport/address.py", "if mode & 0o077:", "if mode < 0:",
           "transport/test_address.py::test_a_private_directory_is_asked_for"),
    Mutant("A2", "transport/zmq_network.py", "        elif self._keys is None:\n",
           '        elif self._keys is None and "127" not in place.host:\n',
           "transport/test_zmq_network.py::test_an_unsafe_address_is_refused_by_both_sides"),
    Mutant("A2", "transport/zmq_curve.py", "            if roles:\n",
           "            if roles := roles or frozenset(CONNECTING_ROLES):\n",
           "transport/test_zmq_network.py::"
           "test_a_strangers_key_gets_nothing_and_an_authorised_one_works"),
    Mutant("A3", "transport/codec.py", "return _DECODER.decode(data)",
           "return msgspec.convert(msgspec.msgpack.decode(data), AnyFrame)",
           "transport/test_codec.py::test_a_bomb_is_refused_within_little_memory"),
    Mutant("A3", "transport/codec.py", ">= MAX_BAD_FRAMES", "< 0",
           "transport/test_zmq_network.py::"
           "test_a_bound_side_that_sends_no_frames_is_cut_off_until_another_takes_its_place"),
    Mutant("A4", "transport/window.py",
           "not self._used_bytes or self._used_bytes + num_bytes <= self._size_bytes", "True",
           "prefill/test_shipper.py::"
           "test_the_window_bounds_what_is_under_way_and_credit_opens_it"),
    Mutant("A5", "engine/model_config.py", "    if unsafe:\n", "    if not model_dir:\n",
           "engine/test_model_config.py::test_a_directory_with_code_in_it_is_refused"),
    Mutant("A5", "engine/model_config.py", 'if fields.get("auto_map"):', "if not fields:",
           "engine/test_model_config.py::test_what_cannot_be_computed_is_refused"),
    Mutant("A5", "store/model_dir/headers.py",
           "if not _SHARD_NAME.fullmatch(name):", "if not name:",
           "engine/test_weights.py::test_a_lying_index_is_a_clean_error"),
    Mutant("A5", _BOUNDED, "if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):", "if not file:",
           f"{_STRANGERS}::"
           "test_what_is_no_file_of_a_fit_size_is_refused_and_not_waited_for"),
    Mutant("A5", _BOUNDED, "    if len(content) > most:\n", "    if len(content) < 0:\n",
           f"{_STRANGERS}::"
           "test_what_is_no_file_of_a_fit_size_is_refused_and_not_waited_for"),
    Mutant("A5", _BOUNDED,
           'if sum(map(content.count, (b",", b"[", b"{"))) > most:', "if most < 0:",
           f"{_STRANGERS}::test_json_of_too_many_values_is_refused_before_it_is_parsed"),
    Mutant("A5", _BOUNDED, "not 1 <= value <= most:", "value < 1:",
           f"{_STRANGERS}::"
           "test_a_number_beyond_its_range_is_refused_by_file_field_value_and_range"),
    Mutant("A5", _BOUNDED, "if ends is not None and ends[0]() > ends[1]:", "if ends == ():",
           f"{_STRANGERS}::"
           "test_a_check_opens_no_file_after_its_time_and_an_inner_check_gets_no_more"),
    Mutant("A5", "store/model_dir/headers.py",
           "    if count > MAX_TENSORS:\n", "    if count < 0:\n",
           f"{_STRANGERS}::"
           "test_more_tensors_than_models_have_are_refused_in_one_file_and_in_all"),
    Mutant("A5", "store/gguf/container.py",
           "        if count > most:\n", "        if most < 0:\n",
           f"{_STRANGERS}::"
           "test_a_gguf_file_that_announces_more_than_models_have_is_refused"),
    Mutant("A6", "server/api/served_models.py",
           "found = self._by_name.get(name)\n",
           "found = self._by_name.get(name) or (open(name) and self._any)\n",
           "security/test_files_and_connections.py::"
           "test_no_word_of_a_client_finds_a_model_or_a_file"),
    Mutant("A6", "server/api/operations/pages.py", "    file = files.get(name)\n",
           '    file = files.get(name)\n    import contextlib\n'
           '    with contextlib.suppress(OSError):\n        open("/x/" + name).close()\n',
           "security/test_files_and_connections.py::"
           "test_a_server_opens_no_file_and_connects_to_nobody_for_a_client"),
    Mutant("A7", "server/api/schemas.py",
           'raise PydanticCustomError("unsupported", f"content of type {echo(kind)} ({advice})")',
           'import socket\n            socket.create_connection(("127.0.0.1", 9), 1)',
           "security/test_files_and_connections.py::"
           "test_a_server_opens_no_file_and_connects_to_nobody_for_a_client"),
    Mutant("A8", "server/edge/tcp.py",
           "scope.deadline = opened_at + self._bounds.header_timeout_s", "pass",
           f"{_HTTP}::test_a_slow_head_is_ended"),
    Mutant("A8", "server/api/body.py",
           "scope.deadline = began_at + min(allowed_s, config.body_timeout_s)",
           "scope.deadline = began_at + allowed_s + 3600",
           f"{_HTTP}::test_a_slow_body_is_ended"),
    Mutant("A8", _HEAD_GUARD,
           "        if self.stream is not None:  # a request",
           "        if self.stream is not self:  # a request",
           f"{_CHUNKS}::"
           "test_a_body_whose_end_waits_while_its_request_is_answered_ends_nothing"),
    Mutant("A8", _HEAD_GUARD,
           'num_bytes + getattr(reader, "_bytes_in_chunk", 0) > ',
           "num_bytes > ",
           f"{_CHUNKS}::test_a_chunk_beyond_the_bound_of_bodies_is_refused_by_its_size"),
    Mutant("A8", _HEAD_GUARD,
           "self._num_chunks += event.chunk_start",
           "self._num_chunks += 0",
           f"{_CHUNKS}::test_small_chunks_are_refused_beyond_a_number_unless_they_are_large_"
           "enough_on_average"),
    Mutant("A9", "server/edge/tcp.py", "return self._left_s <= 0", "return False",
           "server/edge/test_write_deadline.py::"
           "test_who_takes_less_than_enough_is_not_waited_for_for_ever"),
    Mutant("A10", _HEAD_GUARD, "if len(head) > self._max_bytes:", "if len(head) < 0:", _HEADS),
    Mutant("A10", _HEAD_GUARD, "if len(fields) > self._max_fields:", "if len(fields) < 0:",
           _HEADS),
    Mutant("A11", _HEAD_GUARD, 'if version not in {b"1.0", b"1.1"}:', "if not version:",
           f"{_HTTP}::test_http_2_is_not_spoken"),
    Mutant("A11", "server/api/request_scope.py",
           "running.cancel(self.connection.disconnect_reason)", "pass",
           f"{_HTTP}::test_hundreds_of_dropped_streams_leave_nothing"),
    Mutant("A12", _HEAD_GUARD, "if _BARE.search(head):", "if not head and _BARE:", _HEADS),
    Mutant("A12", _HEAD_GUARD, "if name in _ONCE and name in values:", "if name in ():", _HEADS),
    Mutant("A12", _HEAD_GUARD, 'if length is not None or version == b"1.0":', "if not version:",
           _HEADS),
    Mutant("A13", "server/api/access.py",
           "permission is not Permission.NONE and not scope.connection.is_unix",
           'request.path.startswith("/v1")',
           f"{_KEYS}::test_no_route_is_open_that_is_not_named_as_open"),
    Mutant("A13", "server/api/access.py",
           "if permission is Permission.OPERATOR and tenant.role is not TenantRole.OPERATOR:",
           "if not tenant.role:",
           f"{_KEYS}::test_what_concerns_everybody_needs_an_operators_key"),
    Mutant("A14", _JSON, "    if len(value) != len(pairs):\n", "    if not pairs and value:\n",
           _ODD_JSON.replace("what_json_takes_and_we_do_not_is_named",
                             "the_key_that_occurs_twice_is_named")),
    Mutant("A14", _JSON, "if not math.isfinite(value):", "if value != value:", _ODD_JSON),
    Mutant("A14", _JSON, "except RecursionError:", "except ZeroDivisionError:", _ODD_JSON),
    Mutant("A14", _JSON, "    if holds_many_values(body):\n", "    if not body:\n", _ODD_JSON),
    Mutant("A14", "server/text/tool_forms/scanning.py", "except (ValueError, RecursionError):",
           "except ValueError:",
           "server/api/test_tools.py::test_arguments_that_parsers_die_of_stay_text"),
    Mutant("A15", "server/api/schemas.py", "if len(texts) > MAX_STOP_STRINGS:",
           "if len(texts) < 0:", _BOUNDS),
    Mutant("A15", "server/api/schemas.py", " or len(value) > MAX_LOGIT_BIAS:", ":", _BOUNDS),
    Mutant("A15", "server/api/schemas.py", "Field(ge=-(2**63), le=2**63 - 1)", "Field()", _BOMBS),
    Mutant("A16", "server/text/tokenizer.py",
           "if num_bytes > self.max_model_len * longest:", "if num_bytes < 0:",
           "server/text/test_tokenizer.py::"
           "test_text_that_cannot_fit_is_refused_before_it_is_tokenised"),
    Mutant("A16", "server/text/tokenizer.py",
           "self._refuse_beyond(self._guard.least_chars(so_far), MESSAGES)", "pass",
           "server/text/test_tokenizer.py::"
           "test_a_conversation_that_cannot_fit_is_refused_before_it_is_searched"),
    Mutant("A16", "server/text/tokenizer.py", "asked = self._guard.protect(turns)", "asked = turns",
           "server/text/test_tokenizer.py::test_special_tokens_that_a_user_writes_are_text"),
    Mutant("A16", "server/text/processes.py", "with trio.move_on_after(self._timeout_s):\n",
           "with trio.move_on_after(3600):\n", "server/text/test_tokenizer.py::"
           "test_text_that_takes_too_long_is_given_up_and_its_line_goes_on"),
    Mutant("A17", "server/api/schemas.py",
           '"""The body of POST /v1/chat/completions."""\n\n    messages: Annotated[list[Message], '
           "Field(min_length=1, ",
           '"""The body of POST /v1/chat/completions."""\n\n    messages: Annotated[list[Message], '
           "Field(",
           f"{_BAD}::test_wrong_chat_parameters_are_named"),
    Mutant("A17", "server/api/schemas.py", "        if not item:\n", "        if item is None:\n",
           f"{_BAD}::test_wrong_completion_parameters_are_named"),
    Mutant("A18", "server/text/isolated.py",
           "signal.setitimer(signal.ITIMER_PROF, cpu_s)", "pass",
           "server/text/test_grammars.py::test_good_ones_pass_and_others_are_refused_by_name"),
    Mutant("A18", "server/text/isolated.py",
           "resource.setrlimit(resource.RLIMIT_AS, (most, most))", "pass",
           "server/text/test_grammars.py::test_memory_is_bounded_too"),
    Mutant("A18", "server/text/grammar_check.py",
           "            walk(tokenizer, matcher, eos_token_ids, bounds)\n", "",
           "server/text/test_grammars.py::"
           "test_what_costs_too_much_within_some_tens_of_tokens_is_refused_by_name"),
    Mutant("A19", "server/text/template.py", "ImmutableSandboxedEnvironment(",
           "jinja2.Environment(", f"{_LINEAR}::test_a_hostile_template_gets_nowhere"),
    Mutant("A19", "server/text/template.py", "if may_run_here else tree", "if tree else tree",
           _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "_refuse_if(self.built > MAX_BUILT)", "pass",
           _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "if (walk.names, walk.spaces) == before:",
           "if walk.names:", _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "_refuse_if(value.level < self._depth)", "pass",
           _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "_refuse_if(name in _ALL_METHODS)", "pass",
           _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "_refuse_if(len(parts) > MAX_PARTS)", "pass",
           _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "_refuse_if(node.dyn_args or node.dyn_kwargs)\n"
           "    given", "given", _NOT_LINEAR),
    Mutant("A19", "server/text/linear_template.py", "return num_chars <= MAX_TEMPLATE_CHARS",
           "return True",
           f"{_LINEAR}::test_long_templates_and_special_tokens_are_not_linear"),
    Mutant("A19", "server/text/isolated.py",
           "return result if wait_status == 0 and len(result) <= max_bytes else None",
           "return result", f"{_ISOLATED}::test_work_that_takes_too_long_is_ended"),
    Mutant("A19", "server/text/template.py", "if num_chars > max_chars:", "if num_chars < 0:",
           "server/text/test_template.py::test_output_is_bounded"),
    Mutant("A19", "server/text/template.py",
           "            except Exception as error:\n",
           "            except jinja2.TemplateError as error:\n",
           "ops/test_model_check.py::"
           "test_a_template_that_cannot_be_compiled_is_named_with_its_file_before_a_start"),
    Mutant("A20", "server/tenants/tenancy.py",
           "if not hmac.compare_digest(found, digest) or entry is None:",
           "if found != digest or entry is None:",
           f"{_KEYS}::test_digests_are_compared_in_constant_time_for_right_and_wrong_keys"),
    Mutant("A20", "server/tenants/tenancy.py",
           "if stored.until is not None and now >= stored.until:",
           "if now < 0:", f"{_TENANCY}::test_a_key_is_let_in_until_it_ends"),
    Mutant("A20", "server/tenants/tenancy.py",
           "    if tenant.is_disabled:\n", "    if not tenant:\n",
           f"{_TENANCY}::test_a_disabled_tenant_is_told_so_by_its_own_key_only"),
    Mutant("A20", "server/api/openai/responses_socket.py",
           "check_key(services, self._connection, self._socket.headers, self._subprotocols)",
           "pass",
           "server/api/test_service_tier.py::"
           "test_a_change_counts_on_an_open_websocket_from_the_next_message_on"),
    Mutant("A21", "server/api/generate.py", "    if secret:\n", "    if secret is None:\n",
           f"{_KEYS}::test_tenants_share_no_kv_and_a_tenant_shares_with_itself"),
    Mutant("A21", "engine/prefix_cache.py", "node = self._top.children.get(salt)",
           "node = next(iter(self._top.children.values()), None)",
           "engine/test_prefix_cache.py::test_salts_share_nothing"),
    Mutant("A21", "server/cache/front.py", "            request.scheduling.tenant,\n", "",
           "server/test_response_store.py::test_whatever_may_change_an_answer_changes_its_name"),
    Mutant("A22", "engine/prefix_cache.py",
           "return (tokens[start : start + size] for start in",
           "return (tokens[start : start + 1] for start in",
           "engine/test_prefix_cache.py::"
           "test_whoever_begins_alike_finds_whole_blocks_but_never_its_last_token"),
    Mutant("A23", "engine/block_ledger.py", "            self._poison.poison(freed)\n",
           "            pass\n",
           "engine/test_block_ledger.py::"
           "test_free_blocks_are_poisoned_and_their_owners_may_write"),
    Mutant("A24", "server/edge/websocket.py", "self.handshake.extensions = None", "pass",
           f"{_WS}::test_compression_is_not_negotiated"),
    Mutant("A24", "server/edge/websocket.py", "if not self._frames.take(now):",
           "if self._frames.take(now) is None:", f"{_WS}::test_a_flood_is_1008"),
    Mutant("A24", "server/edge/websocket.py",
           "await self._fail(CloseReason.MESSAGE_TOO_BIG)", "pass",
           f"{_WS}::test_a_message_beyond_the_bound_is_1009"),
    Mutant("A25", "server/api/access.py",
           'check_origin(websocket.headers.get("origin"), websocket.headers.get("host"), origins)',
           "pass",
           f"{_WS}::test_a_foreign_or_broken_handshake_is_refused"),
    Mutant("A25", "server/api/access.py", "    if _is_own(origin, host):\n",
           "    if origin:\n",
           f"{_TYPES}::test_no_page_posts_across_sites_without_a_preflight"),
    Mutant("A25", "server/api/access.py", "if media is None or media in _ASKED_FIRST:",
           "if media is None or media:",
           f"{_TYPES}::test_no_page_posts_across_sites_without_a_preflight"),
    Mutant("A25", "server/api/access.py", "if route.is_for_pages else ()",
           'if route.path != "" else ()',
           "server/api/test_cross_origin.py::"
           "test_no_page_of_another_origin_reads_what_is_for_operators"),
    Mutant("A25", "server/api/access.py",
           "check_key(services, connection, websocket.headers, websocket.requested_subprotocols)",
           "pass",
           f"{_KEYS}::test_a_websocket_needs_a_key_too_and_never_in_its_address"),
    Mutant("A26", "server/edge/websocket.py",
           "if trio.current_time() - self._heard_at > self.bounds.ws_pong_timeout_s:",
           "if trio.current_time() < 0:",
           f"{_WS}::test_a_peer_without_pongs_is_closed_and_what_it_began_is_freed"),
    Mutant("A27", "ops/logs.py", "structlog.processors.JSONRenderer(default=repr)",
           "structlog.processors.KeyValueRenderer()",
           "ops/test_logs.py::test_every_line_is_json_whatever_is_logged"),
    Mutant("A27", "ops/logs.py", "if len(text) > MAX_VALUE_CHARACTERS:", "if len(text) < 0:",
           "ops/test_logs.py::test_long_values_are_cut"),
    Mutant("A28", "server/metrics/fleet.py", "if len(self._seen) >= MAX_WORDS:",
           "if len(self._seen) < 0:",
           "server/test_metrics.py::test_a_label_never_has_more_words_than_its_bound"),
    Mutant("A29", "triolet/tenants/form.py", 'shown = "" if name == "keys" else',
           'shown = "" if name == "none" else',
           "triolet/test_tenants_form.py::test_what_is_wrong_is_named"),
    Mutant("A29", "server/app.py", 'log.error("request_failed", request_id=request_id,',
           'log.error("request_failed", what=dict(request.headers), request_id=request_id,',
           "security/test_secrets.py::"
           "test_a_request_that_fails_inside_tells_nothing_of_its_words"),
    Mutant("A30", "server/edge/listen.py",
           "            await trio.serve_listeners(self._serve, listeners, "
           "handler_nursery=connections)\n",
           "            while True:\n"
           "                connections.start_soon(self._serve, await listeners[0].accept())\n",
           "server/test_main.py::test_it_lives_through_a_time_without_files_and_accepts_again"),
    Mutant("A36", "server/api/resume.py", "owner = max(finished, key=held.__getitem__)",
           "owner = next(iter(finished))",
           "server/api/test_resuming.py::test_a_tenant_with_many_answers_pushes_out_its_own_only"),
    Mutant("A37", "server/tenants/memory_store.py", "make_private_database(Path(path))", "pass",
           f"{_PRIVATE}::test_databases_and_what_lies_beside_them_are_private"),
    Mutant("A37", "triolet/sqlite.py", "make_private_database(path)", "pass",
           f"{_PRIVATE}::test_databases_and_what_lies_beside_them_are_private"),
    Mutant("A37", "triolet/private_files.py", "os.umask(_OTHERS)", "pass",
           f"{_PRIVATE}::test_whatever_a_process_makes_after_its_start_is_private"),
    Mutant("A37", "ops/role_process.py", "    keep_private()\n", "",
           f"{_PRIVATE}::test_a_role_started_by_itself_makes_private_files"),
    Mutant("A37", "ops/cli/commands.py", "    keep_private()\n", "",
           "end_to_end/test_stored_things.py::test_no_file_of_a_fleet_is_for_others"),
    Mutant("A37", "triolet/private_files.py", "path.chmod(mode & ~_OTHERS)", "pass",
           f"{_PRIVATE}::test_wide_files_of_an_earlier_release_are_tightened_with_their_content"),
    Mutant("A37", "triolet/private_files.py",
           "if any(not path.name.startswith(own_names) for path in folder.iterdir()):",
           "if mode < 0:",
           f"{_PRIVATE}::"
           "test_a_wide_folder_of_the_database_alone_is_tightened_and_another_is_refused"),
    Mutant("A37", "ops/log_stream.py", "if not (self._is_file and num_bytes):",
           "if num_bytes or self._is_file:",
           "ops/test_logs.py::"
           "test_a_disk_that_fills_up_tears_no_line_and_what_is_missing_is_counted"),
    Mutant("A37", "ops/log_stream.py", "self._num_dropped, self._rest = 0, left",
           'self._num_dropped, self._rest = 0, b""',
           "ops/test_logs.py::"
           "test_a_line_that_a_socket_took_in_part_is_completed_before_the_next"),
    Mutant("A38", "server/edge/http.py", "if not data.startswith(PROBES):", "if not data:",
           "server/edge/test_request_turns.py::"
           "test_a_probe_of_liveness_is_answered_before_a_crowd"),
    Mutant("A38", "server/edge/http.py", "if not self._is_in_turn:", "if self is None:",
           "server/edge/test_request_turns.py::"
           "test_a_probe_of_liveness_is_answered_before_a_crowd"),
    Mutant("A38", "server/edge/http.py", "key[1] if key else", "b'' if key else",
           "server/edge/test_request_turns.py::"
           "test_a_request_does_not_wait_for_those_of_a_crowd_with_another_key"),
    Mutant("A38", "server/metrics/exposition.py", "            if self._num_done < wanted:",
           "            if wanted:",
           "server/test_metrics.py::"
           "test_scrapes_at_once_share_one_text_that_was_begun_after_they_asked"),
    Mutant("A38", "server/metrics/exposition.py", "        await trio.lowlevel.checkpoint()\n", "",
           "server/test_metrics.py::"
           "test_a_scrape_lets_others_have_their_turn_after_some_samples"),
    Mutant("A34", _TABLE, "own.count >= self._max_per_address:", "own.count < 0:",
           f"{_CROWDS}::test_one_address_with_idle_connections_only_keeps_no_other_out"),
    Mutant("A34", _TABLE, "next(iter(self._without_key or self._with_key), None)",
           "next(iter(self._with_key or self._without_key), None)",
           f"{_CROWDS}::"
           "test_a_full_server_closes_who_has_shown_no_key_before_a_tenants_idle_connection"),
    Mutant("A34", "server/edge/tcp.py", "self._note_idle(event.idle)", "pass",
           f"{_CROWDS}::"
           "test_connections_on_which_something_runs_stay_and_their_address_gets_a_429"),
    Mutant("A34", "server/edge/tcp.py",
           "and not self._edge.proxies.trusts(opening.host):", "and not opening.host:",
           f"{_CROWDS}::test_connections_by_proxy_protocol_count_for_their_client"),
    Mutant("A34", "server/edge/http.py",
           "self._speaks_for_others = remote.is_unix or self._proxies.trusts(remote.host)",
           "self._speaks_for_others = True",
           f"{_CROWDS}::test_a_trusted_proxy_names_the_client_and_nobody_else_does"),
    Mutant("A34", "server/edge/http.py",
           "host is not None and self._proxies.trusts(host)", "bool(host)",
           f"{_CROWDS}::test_a_trusted_proxy_names_the_client_and_nobody_else_does"),
    Mutant("A34", "server/api/body.py",
           "return is_local and not peer.is_forwarding and",
           "return is_local and",
           f"{_CROWDS}::test_a_client_that_a_proxy_calls_local_is_not_from_here"),
    Mutant("A34", "server/edge/client_address.py",
           "return named.pop() if len(named) == 1 else None",
           "return named.pop() if named else None",
           f"{_ADDRESS}::test_two_headers_that_disagree_name_no_client"),
    Mutant("A34", "server/edge/client_address.py", "if not self.trusts(found):",
           "if node is nodes[0]:",
           f"{_ADDRESS}::test_the_last_address_that_is_no_proxy_counts"),
    Mutant("A34", "server/edge/client_address.py", "_V6_CLIENT_BITS: Final = 64",
           "_V6_CLIENT_BITS: Final = 128",
           f"{_ADDRESS}::"
           "test_connections_of_one_ipv6_network_of_64_bits_are_counted_together"),
    Mutant("A32", "server/api/access.py",
           'if route is not None and route.cost != "nothing":',
           "if not services:",
           f"{_DOOR}::test_who_has_no_request_left_is_refused_before_its_body_is_sent"),
    Mutant("A32", "server/api/request_scope.py", "self.ticket.has_cost = True", "pass",
           f"{_DOOR}::"
           "test_what_is_refused_after_work_is_a_request_and_what_the_server_fails_is_none"),
    Mutant("A32", "server/text/turns.py",
           "used_s, _, key = min(able)", "used_s, _, key = able[0]",
           f"{_TURNS}::test_a_key_with_long_jobs_gets_no_more_time_than_one_with_short_ones"),
    Mutant("A32", "server/text/turns.py",
           "if self._slots == 1 or len(line.running) < self._slots - 1:", "if self._slots:",
           f"{_TURNS}::test_one_key_leaves_a_slot_to_others_while_there_are_any"),
    Mutant("A32", "server/text/turns.py", "return turns.join(current_line(), item,",
           'return turns.join("", item,',
           "server/text/test_grammars.py::test_a_line_of_one_clients_grammars_is_not_in_front_of_anothers"),
    Mutant("A33", "server/api/access.py", "            _take_room(services, entry, key)\n",
           "            pass\n",
           f"{_DOOR}::test_a_tenant_has_room_for_so_many_bytes_and_all_together_for_more"),
    Mutant("A33", "server/tenants/quotas.py",
           "if most is not None and self.num_under_way(name) >= most:",
           "if most is not None and most < 0:",
           f"{_DOOR}::"
           "test_bodies_under_way_count_as_requests_at_once_and_end_with_their_clients"),
    Mutant("A31", "triolet/grammar.py", "step_max_items=5_000", "step_max_items=50_000",
           "triolet/test_grammar.py::test_an_ambiguous_grammar_ends_while_its_masks_are_cheap"),
    Mutant("A31", "engine/mask_lanes.py", "        running.masked.condemn()\n", "        return\n",
           f"{_MASKS}::"
           "test_a_mask_that_takes_too_long_ends_its_sequence_and_holds_up_no_other"),
    Mutant("A31", "engine/constraints.py", "or self._spent_s > allowed_s:", "or self._spent_s < 0:",
           f"{_MASKS}::test_a_sequence_has_so_much_time_for_all_its_masks"),
    Mutant("A31", "engine/sampler.py", "return constraint.late()", "raise",
           f"{_MASKS}::test_a_row_whose_mask_does_not_come_is_left_out_alone"),
    Mutant("A31", "server/scheduling/attempt.py",
           "self.recovery.condemn(request.spec, now)", "pass",
           "server/scheduling/test_suspects.py::"
           "test_a_grammar_that_held_a_worker_up_ends_its_request_and_is_refused_for_its_tenant"),
    Mutant("A35", "transport/gate.py", "        if peer.role not in credential.roles:\n",
           "        if not credential.roles:\n",
           f"{_ATTACKED}::"
           "test_on_loopback_nobody_without_a_servers_key_gets_an_audit_a_token_or_a_drain"),
    Mutant("A35", "transport/gate.py",
           "        if held is not None and held.key != credential.key:\n",
           "        if held is not None and not held.key and credential.key:\n",
           "transport/test_zmq_handshakes.py::"
           "test_a_key_may_say_hello_in_its_role_only_and_to_no_name_of_another_key"),
    Mutant("A35", "transport/gate.py",
           "return self._name_of.get(connection) or STRANGER + connection",
           "return self._name_of.get(connection) or next(iter(self._claims), b'?')",
           f"{_LINKS}::"
           "test_who_connects_under_a_peers_name_gets_nothing_of_it_and_leaves_it_alone"),
    Mutant("A35", "server/scheduling/links.py",
           "                if now - asked_since >= patience_s:\n",
           "                if now < 0:\n",
           "server/scheduling/test_fleet.py::"
           "test_a_hello_without_an_answer_is_said_again_over_a_new_connection"),
    Mutant("A35", "server/scheduling/links.py",
           "                    asked_since = min(asked_since, now)\n                if now",
           "                if now",
           f"{_ATTACKED}::"
           "test_a_server_that_is_refused_says_by_whom_and_is_let_in_without_a_restart"),
    Mutant("A35", "decode/intake.py",
           "        self._counters.drop(Drop.FORGED)\n        return True",
           "        self._counters.drop(Drop.FORGED)\n        return False",
           "worker/test_pair_forged.py::test_a_forged_chunk_writes_nothing_and_gets_no_answer"),
    Mutant("A35", "transport/digest.py", "    head = encode(bare)\n", '    head = b""\n',
           "worker/test_pair_forged.py::test_a_forged_chunk_writes_nothing_and_gets_no_answer"),
    Mutant("A35", "transport/digest.py",
           'name = attempt.request_id + attempt.attempt.to_bytes(8, "big")',
           "name = attempt.request_id",
           "worker/test_pair_forged.py::"
           "test_a_mac_is_of_every_field_but_the_way_that_the_bytes_came"),
    Mutant("A35", "triolet/ids.py",
           'return f"{self.name}@{shown_epoch(self.epoch)}"',
           'return f"{self.name}@{self.epoch:016x}"',
           "triolet/test_ground_floor.py::test_two_lives_of_a_worker_have_two_names"),
    Mutant("A39", "ops/audit/verification.py",
           "        if one.head.root == root:\n",
           "        if one.head.root:\n",
           f"{_AUDIT_LOG}/test_verification.py::"
           "test_an_entry_that_was_rewritten_with_its_hash_is_found_by_the_next_head"),
    Mutant("A39", "ops/audit/verification.py",
           "        if longest is not None and longest.head.size > size",
           "        if longest is not None and longest.head.size < size",
           f"{_AUDIT_LOG}/test_verification.py::test_a_tail_that_was_cut_off_is_found"),
    Mutant("A39", "ops/audit/heads.py",
           "        if not newline and (self._path.parent / KEY_NAME).exists():",
           "        if not newline and self.newest is not None:",
           f"{_AUDIT_LOG}/test_verification.py::"
           "test_a_log_whose_heads_are_all_gone_is_wrong_and_never_signed_again"),
    Mutant("A39", "ops/audit/heads.py",
           "        if end < self._end:\n", "        if end < 0:\n",
           f"{_AUDIT_LOG}/test_log.py::test_an_open_log_signs_nothing_once_heads_were_removed"),
    Mutant("A39", "ops/audit/segments.py",
           "            os.ftruncate(self._fd, offset)\n            raise\n",
           "            raise\n",
           f"{_AUDIT_LOG}/test_log.py::"
           "test_a_full_disk_refuses_the_entry_and_leaves_the_log_as_it_was"),
    Mutant("A39", "ops/audit/recording.py",
           "    note(AuditOutcome.BEGUN)\n", "",
           "ops/test_audit_commands.py::test_a_change_that_cannot_be_recorded_is_not_made"),
    Mutant("A40", "store/registry/blobs.py",
           "    if not one.is_right:\n        raise",
           "    if one.is_right is None:\n        raise",
           f"{_REGISTRY}/test_lies.py::test_bytes_with_another_digest_are_not_kept"),
    Mutant("A40", "store/registry/client.py",
           "        if expected != found:\n",
           "        if not found:\n",
           f"{_REGISTRY}/test_lies.py::test_a_manifest_with_another_digest_is_refused"),
    Mutant("A40", "store/registry/client.py",
           'is_own, sent = url.join("/") == self._base.join("/"), self._authorization',
           "is_own, sent = True, self._authorization",
           f"{_REGISTRY}/test_lies.py::test_no_password_goes_elsewhere_or_into_an_error"),
    Mutant("A40", "store/registry/client.py",
           '            text = text.replace(secret, "***")\n',
           "            text = text.strip()\n",
           f"{_REGISTRY}/test_lies.py::test_no_password_goes_elsewhere_or_into_an_error"),
    Mutant("A40", "store/registry/client.py",
           "        may_be_plain = self.is_insecure or is_loopback(url.host)\n",
           "        may_be_plain = True\n",
           f"{_REGISTRY}/test_lies.py::"
           "test_what_is_asked_beyond_this_machine_without_tls_is_refused"),
    Mutant("A40", "store/aliases.py",
           "            self._require_signed(connection, pointer.name, [pointer], digest, ())\n"
           "            if old != digest:\n",
           "            if old != digest:\n",
           f"{_SIGNATURES}::test_an_alias_takes_only_what_one_of_its_keys_has_signed"),
    Mutant("A40", "store/signatures.py",
           '    if subject.digest != {"sha256": digest.removeprefix("sha256:")}:\n',
           "    if not subject.digest:\n",
           f"{_SIGNATURES}::test_what_is_no_signature_is_refused"),
    Mutant("A40", "store/registry/pull.py",
           "        Aliases(store).require_signed(reference, digest, referrers.signers)\n",
           "        Aliases(store).all()\n",
           f"{_REGISTRY}/test_signatures.py::"
           "test_nothing_is_fetched_or_named_without_the_signature_that_is_required"),
    Mutant("A43", "server/scheduling/delivery.py", "while frames and len(small) < INPUTS_AT_ONCE:",
           "while frames:",
           "server/scheduling/test_delivery.py::"
           "test_of_many_frames_a_few_are_taken_before_others_may_run"),
    Mutant("A43", "server/metrics/access_log.py", '(log.debug, "input_ended")',
           '(log.info, "input_ended")',
           "server/scheduling/test_embeddings.py::"
           "test_inputs_leave_no_lines_in_the_log_at_level_info"),
    Mutant("A43", "server/api/stream.py", "self._answers[index].scored += scored",
           "self._answers[index].scored = scored",
           "server/api/test_completions.py::"
           "test_alternatives_are_written_as_their_tokens_come"),
    Mutant("A44", "server/scheduling/control_link.py",
           "if told.fence < self._told.fence:\n", "if told.fence < 0:\n",
           "ops/control/test_several_hosts.py::test_news_of_an_earlier_control_are_ignored"),
    Mutant("A42", "ops/control/admin.py",
           "_require_references((model.ref, *model.adapters.values()))",
           "_require_references(())",
           "ops/control/test_changes.py::test_the_port_takes_versions_of_the_store_and_no_paths"),
    Mutant("A42", "ops/control/admin.py",
           "_require_references((ref,))",
           "_require_references(())",
           "ops/control/test_adapters.py::"
           "test_the_port_takes_versions_of_the_store_and_no_paths_of_adapters"),
    Mutant("A42", "ops/control/admin.py",
           "_require_references([ref])",
           "_require_references([])",
           "ops/control/test_switch.py::"
           "test_the_port_switches_to_versions_of_the_store_and_to_no_path"),
    Mutant("A42", "ops/control/switches.py",
           "operation.model, order.replaced, order.ref, is_of_port(operation)",
           "operation.model, order.replaced, order.ref, False",
           "ops/control/test_switch.py::"
           "test_the_port_switches_to_versions_of_the_store_and_to_no_path"),
    Mutant("A42", "ops/control/adapters.py",
           "LoadAdapterRequest(name, order.name, order.ref, is_of_port(operation))",
           "LoadAdapterRequest(name, order.name, order.ref, False)",
           "ops/control/test_adapters.py::"
           "test_the_port_takes_versions_of_the_store_and_no_paths_of_adapters"),
    Mutant("A42", "ops/models/stored.py",
           "    if is_reference_only and not is_meant:\n",
           "    if is_reference_only and named is None:\n",
           "ops/test_model_set.py::test_a_model_of_the_port_has_no_directories"),
    Mutant("A42", "ops/models/adapters.py",
           "    if is_reference_only and not is_meant:\n",
           "    if is_reference_only and not given:\n",
           "ops/test_adapter_set.py::"
           "test_a_version_is_held_in_the_store_until_its_adapter_is_unloaded"),
)  # fmt: skip
