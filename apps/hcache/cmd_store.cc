// hcache store stat|ls|verify|repair|gc|export|import|rm|new-key: looks after the saved state.

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "base/env.h"
#include "base/units.h"
#include "commands.h"
#include "common_options.h"
#include "policy/snapshots.h"
#include "store/archive.h"
#include "store/session_name.h"
#include "store/store.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

struct StoreArgs : Options {
  StoreOptions folders{this};
  bool json = flag(&json, "--json", "print JSON instead of text");
};

struct ListArgs : StoreArgs {
  bool chunks = flag(&chunks, "--chunks", "list chunks instead of sessions");
};

struct VerifyArgs : StoreArgs {
  bool repair =
      flag(&repair, "--repair", "drop damaged pages, so that what they held is recomputed");
};

struct RepairArgs : StoreArgs {
  bool rebuild =
      flag(&rebuild, "--rebuild", "make the catalog anew even if nothing seems wrong with it");
};

struct ExportArgs : StoreArgs {
  std::string session = text(&session, "--session", "NAME", "",
                             "conversation to write, as `hcache store ls` names it");
  std::string file = text(&file, "-o,--out", "FILE", "", "session file to write");
};

struct ImportArgs : StoreArgs {
  std::string file = text(&file, "-f,--file", "FILE", "", "session file to read");
  std::string session =
      text(&session, "--session", "NAME", "", "name for the conversation; default: the file's");
  std::string salt =
      text(&salt, "--salt", "TEXT", "", "cache salt: nothing is shared between different salts");
  StateOptions state{nullptr};

  ImportArgs() { offer(state, {&state.quota_bytes, &state.snapshot_quota_bytes}); }
};

struct KeyArgs : Options {
  std::string file = text(&file, "-o,--out", "FILE", "", "key file to write; it must not exist");
};

struct RemoveArgs : StoreArgs {
  std::string session =
      text(&session, "--session", "NAME", "", "remove this conversation and what only it uses");
  std::string chunk = text(&chunk, "--chunk", "ID", "", "remove this chunk and all that follow it");
  int64_t unused_for_ns =
      duration(&unused_for_ns, "--unused-for", 0,
               "remove chunks not used for this long (30m, 12h, 7d)", {.shows_default = false});
  bool all = flag(&all, "--all", "remove every chunk and conversation");
};

Result<store::StoreOptions> store_options(const StoreArgs& args) {
  store::StoreOptions options;
  options.dirs = args.folders.stores;
  HCACHE_ASSIGN_OR_RETURN(options.key, args.folders.key());
  return options;
}

Result<std::unique_ptr<store::Store>> open(const StoreArgs& args, bool read_only) {
  HCACHE_ASSIGN_OR_RETURN(store::StoreOptions options, store_options(args));
  options.read_only = read_only;
  return store::Store::open(Env::real(), options);
}

// For writing, within the quotas.
Result<std::unique_ptr<store::Store>> open(const ImportArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(store::StoreOptions options, store_options(args));
  options.quota_bytes = args.state.quota_bytes;
  options.snapshot_quota_bytes = args.state.snapshot_quota_bytes.value_or(
      policy::default_snapshot_quota(options.quota_bytes, false));
  return store::Store::open(Env::real(), options);
}

// "2026-03-01 12:00:05", UTC.
std::string format_time(int64_t wall_ns) {
  const auto time = std::chrono::system_clock::time_point(
      std::chrono::duration_cast<std::chrono::system_clock::duration>(
          std::chrono::nanoseconds(wall_ns)));
  return fmt::format("{:%Y-%m-%d %H:%M:%S}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(time)));
}

Status stat(const StoreArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args, true));
  HCACHE_ASSIGN_OR_RETURN(const store::StoreStat s, store->stat());
  const uint64_t total = s.allocated_bytes + s.catalog_bytes + s.record_bytes;
  const double per_token =
      s.tokens == 0 ? 0 : static_cast<double>(total) / static_cast<double>(s.tokens);
  if (args.json) {
    Json json = {{"format_version", s.format_version},
                 {"sessions", s.sessions},
                 {"chunks", s.chunks},
                 {"tokens", s.tokens},
                 {"pages", s.pages},
                 {"page_bytes", s.page_bytes},
                 {"snapshots", s.snapshots},
                 {"snapshot_bytes", s.snapshot_bytes},
                 {"allocated_bytes", s.allocated_bytes},
                 {"catalog_bytes", s.catalog_bytes},
                 {"record_bytes", s.record_bytes},
                 {"bytes_per_token", per_token},
                 {"disks", Json::array()}};
    for (const store::DiskStat& d : s.disks) {
      json["disks"].push_back({{"dir", d.dir},
                               {"segments", d.segments},
                               {"page_bytes", d.page_bytes},
                               {"allocated_bytes", d.allocated_bytes},
                               {"free_bytes", d.free_bytes}});
    }
    return write_json(json, "");
  }
  fmt::print("sessions      {}\n", s.sessions);
  fmt::print("chunks        {} holding {} tokens in {} pages\n", s.chunks, s.tokens, s.pages);
  fmt::print("on disk       {} of pages, {} of catalog, {} of records; {:.0f} bytes per token\n",
             format_bytes(s.allocated_bytes), format_bytes(s.catalog_bytes),
             format_bytes(s.record_bytes), per_token);
  if (s.snapshots > 0) {
    fmt::print("snapshots     {} of {}\n", s.snapshots, format_bytes(s.snapshot_bytes));
  }
  fmt::print("quota         {}\n", s.quota_bytes == 0 ? "none" : format_bytes(s.quota_bytes));
  std::vector<std::vector<std::string>> rows = {{"folder", "segments", "pages", "free"}};
  for (const store::DiskStat& d : s.disks) {
    rows.push_back({d.dir, fmt::format("{}", d.segments), format_bytes(d.allocated_bytes),
                    format_bytes(d.free_bytes)});
  }
  fmt::print("\n{}", format_columns(rows));
  return {};
}

// "hidden-q8_1:26 kv:4": how many layers have a page in each encoding.
std::string describe_pages(const store::ChunkInfo& info) {
  std::map<std::string_view, int> layers;
  for (const store::PageInfo& page : info.pages) layers[store::encoding_name(page.encoding)]++;
  std::string out;
  for (const auto& [name, n] : layers) {
    out += fmt::format("{}{}:{}", out.empty() ? "" : " ", name, n);
  }
  return out;
}

Status list_chunks(const ListArgs& args, store::Store& store) {
  Json json = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"chunk", "parent", "tokens", "bytes", "last used (UTC)", "layers"}};
  HCACHE_RETURN_IF_ERROR(store.list([&](const store::ChunkSummary& c) {
    const std::string parent = c.info.parent.is_zero() ? "-" : to_hex(c.info.parent);
    if (args.json) {
      json.push_back({{"id", to_hex(c.info.id)},
                      {"parent", c.info.parent.is_zero() ? Json(nullptr) : Json(parent)},
                      {"fingerprint", to_hex(c.info.fingerprint)},
                      {"salt", to_hex(c.info.salt)},
                      {"first_position", c.info.first_position},
                      {"tokens", c.info.tokens.size()},
                      {"page_bytes", c.page_bytes},
                      {"last_used", format_time(c.last_used_ns)},
                      {"pages", describe_pages(c.info)}});
    } else {
      rows.push_back({to_hex(c.info.id), parent, fmt::format("{}", c.info.tokens.size()),
                      fmt::format("{}", c.page_bytes), format_time(c.last_used_ns),
                      describe_pages(c.info)});
    }
    return !interrupted();
  }));
  if (args.json) return write_json(json, "");
  fmt::print("{}", format_columns(rows));
  return {};
}

Status list(const ListArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args, true));
  if (args.chunks) return list_chunks(args, *store);
  HCACHE_ASSIGN_OR_RETURN(const auto sessions, store->list_sessions());
  if (args.json) {
    Json json = Json::array();
    for (const store::SessionSummary& s : sessions) {
      json.push_back({{"name", s.name},
                      {"tokens", s.n_tokens},
                      {"fingerprint", to_hex(s.fingerprint)},
                      {"created", format_time(s.created_ns)},
                      {"updated", format_time(s.updated_ns)}});
    }
    return write_json(json, "");
  }
  std::vector<std::vector<std::string>> rows = {{"session", "tokens", "created (UTC)", "updated"}};
  for (const store::SessionSummary& s : sessions) {
    rows.push_back({s.name, fmt::format("{}", s.n_tokens), format_time(s.created_ns),
                    format_time(s.updated_ns)});
  }
  fmt::print("{}", format_columns(rows));
  return {};
}

Status verify(const VerifyArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args, !args.repair));
  ProgressLine line;
  HCACHE_ASSIGN_OR_RETURN(
      const store::VerifyReport report, store->verify([&](uint64_t done, uint64_t all) {
        return line.update("checking pages",
                           all == 0 ? 1 : static_cast<double>(done) / static_cast<double>(all));
      }));
  line.finish();
  uint64_t repaired = 0;
  if (args.repair) {
    for (const store::Damage& d : report.damaged_pages) {
      HCACHE_RETURN_IF_ERROR(store->quarantine(d.chunk, d.layer, d.encoding));
      repaired++;
    }
    HCACHE_RETURN_IF_ERROR(store->close());
  }
  if (args.json) {
    Json json = {{"ok", report.ok()},
                 {"chunks", report.chunks},
                 {"pages", report.pages},
                 {"page_bytes", report.page_bytes},
                 {"repaired_pages", repaired},
                 {"damaged_pages", Json::array()},
                 {"damaged_catalog", Json::array()}};
    for (const store::Damage& d : report.damaged_pages) {
      json["damaged_pages"].push_back({{"chunk", to_hex(d.chunk)},
                                       {"layer", d.layer},
                                       {"encoding", store::encoding_name(d.encoding)},
                                       {"error", d.status.message()}});
    }
    for (const Status& s : report.damaged_catalog) json["damaged_catalog"].push_back(s.message());
    HCACHE_RETURN_IF_ERROR(write_json(json, ""));
  } else {
    fmt::print("checked {} pages ({}) of {} chunks\n", report.pages,
               format_bytes(report.page_bytes), report.chunks);
    for (const store::Damage& d : report.damaged_pages) {
      fmt::print("damaged: {}{}\n", d.status.message(), args.repair ? " (dropped)" : "");
    }
    for (const Status& s : report.damaged_catalog) fmt::print("damaged: {}\n", s.message());
  }
  if (report.damaged_catalog.empty() && repaired == report.damaged_pages.size()) return {};
  return data_loss(fmt::format("{} damaged pages, {} damaged catalog entries{}",
                               report.damaged_pages.size(), report.damaged_catalog.size(),
                               args.repair ? "" : "; --repair drops the pages"));
}

Status repair(const RepairArgs& args) {
  ProgressLine line;
  HCACHE_ASSIGN_OR_RETURN(store::StoreOptions options, store_options(args));
  options.recovery_progress = [&](std::string_view what, double fraction) {
    return line.update(std::string(what), fraction);
  };
  const auto repaired = store::Store::repair(Env::real(), options, args.rebuild);
  line.finish();
  HCACHE_RETURN_IF_ERROR(repaired.status());
  const store::RepairReport& r = *repaired;
  if (args.json) {
    return write_json({{"clean", r.clean()},
                       {"damage", r.damage},
                       {"set_aside", r.set_aside},
                       {"chunks_kept", r.chunks_kept},
                       {"chunks_found", r.chunks_found},
                       {"chunks_dropped", r.chunks_dropped},
                       {"pages_dropped", r.pages_dropped},
                       {"sessions_kept", r.sessions_kept},
                       {"sessions_found", r.sessions_found},
                       {"records_written", r.records_written},
                       {"records_erased", r.records_erased}},
                      "");
  }
  if (r.clean()) fmt::print("nothing to repair\n");
  if (!r.damage.empty()) {
    fmt::print("catalog       made anew: {}\n", r.damage);
    if (!r.set_aside.empty()) {
      fmt::print("old catalog   {} (`hcache store gc` removes it)\n", r.set_aside);
    }
    fmt::print("kept          {} chunks, {} sessions\n", r.chunks_kept, r.sessions_kept);
  }
  if (r.chunks_found + r.sessions_found > 0) {
    fmt::print("found again   {} chunks, {} sessions\n", r.chunks_found, r.sessions_found);
  }
  if (r.chunks_dropped + r.pages_dropped > 0) {
    fmt::print("dropped       {} chunks, {} pages\n", r.chunks_dropped, r.pages_dropped);
  }
  if (r.records_written + r.records_erased > 0) {
    fmt::print("records       {} written, {} erased\n", r.records_written, r.records_erased);
  }
  return {};
}

Status gc(const StoreArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args, false));
  HCACHE_ASSIGN_OR_RETURN(const store::GcReport report, store->gc());
  HCACHE_RETURN_IF_ERROR(store->close());
  if (args.json) {
    return write_json({{"bytes_before", report.bytes_before},
                       {"bytes_after", report.bytes_after},
                       {"segments_removed", report.segments_removed},
                       {"pages_moved", report.pages_moved}},
                      "");
  }
  fmt::print("{} before, {} after; {} segments removed, {} pages moved\n",
             format_bytes(report.bytes_before), format_bytes(report.bytes_after),
             report.segments_removed, report.pages_moved);
  return {};
}

Status write_session(store::Store& store, const std::string& name, File* out) {
  HCACHE_ASSIGN_OR_RETURN(store::Session session, store.get_session(name));
  const Json metadata = Json::parse(session.metadata_json, nullptr, false);
  if (metadata.is_object() && metadata.value(store::kAdapted, false)) {
    return unimplemented(fmt::format(
        "session {} was computed with adapters or a KV budget, which the store does not know; "
        "export it from a server that has them (GET /v1/sessions/{}/export)",
        name, store::client_name(session.salt, name)));
  }
  HCACHE_ASSIGN_OR_RETURN(const store::Match match,
                          store.match(session.fingerprint, session.salt, session.tokens));
  const store::ArchiveHead head = {.fingerprint = session.fingerprint,
                                   .model = {},  // the store knows it by its fingerprint alone
                                   .name = store::client_name(session.salt, name),
                                   .tokens = std::move(session.tokens),
                                   .metadata_json = std::move(session.metadata_json)};
  uint64_t at = 0;
  HCACHE_RETURN_IF_ERROR(
      store::write_archive(store, head, match, [&](std::string_view piece) -> Status {
        if (interrupted()) return cancelled("interrupted");
        HCACHE_RETURN_IF_ERROR(out->write_at(at, std::as_bytes(std::span(piece))));
        at += piece.size();
        return {};
      }));
  return out->sync();
}

Status export_session(const ExportArgs& args) {
  if (args.session.empty() || args.file.empty()) {
    return invalid_argument("say what to export and where to: --session and --out");
  }
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args, true));
  HCACHE_RETURN_IF_ERROR(store->get_session(args.session).status());
  Env& env = Env::real();
  HCACHE_ASSIGN_OR_RETURN(
      const auto out, env.open_file(args.file, {.write = true, .create = true, .truncate = true}));
  if (const Status status = write_session(*store, args.session, out.get()); !status.ok()) {
    env.remove_path(args.file).ignore("the first error is the one to report");
    return status;
  }
  HCACHE_ASSIGN_OR_RETURN(const uint64_t bytes, out->size());
  if (args.json) return write_json({{"name", args.session}, {"bytes", bytes}}, "");
  fmt::print("{} in {}\n", format_bytes(bytes), args.file);
  return {};
}

// Without what was meant for the place that the file comes from.
std::string lasting_metadata(const std::string& text) {
  Json metadata = Json::parse(text, nullptr, false);
  if (!metadata.is_object()) return text;
  metadata.erase("pinned");
  metadata.erase("expires_ns");
  return metadata.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Any model's file is taken: its fingerprint keeps it apart.
Status import_session(const ImportArgs& args) {
  if (args.file.empty()) return invalid_argument("say what to import: --file");
  HCACHE_ASSIGN_OR_RETURN(const std::string file, read_whole_file(Env::real(), args.file));
  HCACHE_ASSIGN_OR_RETURN(const store::Archive archive, store::read_archive(file));
  store::Session session;
  session.salt = salt_id(args.salt);
  session.name =
      store::stored_name(session.salt, args.session.empty() ? archive.head.name : args.session);
  session.fingerprint = archive.head.fingerprint;
  session.tokens = archive.head.tokens;
  session.metadata_json = lasting_metadata(archive.head.metadata_json);
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args));
  if (const Code code = store->get_session(session.name).code(); code != Code::kNotFound) {
    return already_exists(
        fmt::format("there is a session '{}'; choose another name with --session", session.name));
  }
  HCACHE_ASSIGN_OR_RETURN(const store::PutReport report,
                          store::put_archive(*store, archive, own_salt(args.salt)));
  HCACHE_RETURN_IF_ERROR(store->put_session(session));
  HCACHE_RETURN_IF_ERROR(store->close());
  if (args.json) {
    return write_json({{"name", session.name},
                       {"tokens", session.tokens.size()},
                       {"chunks", archive.chunks.size()},
                       {"page_bytes", report.page_bytes}},
                      "");
  }
  fmt::print("session {}: {} tokens, {} of state\n", session.name, session.tokens.size(),
             format_bytes(report.page_bytes));
  return {};
}

Status remove(const RemoveArgs& args) {
  const bool by_filter = !args.chunk.empty() || args.unused_for_ns > 0;
  if (args.session.empty() && !by_filter && !args.all) {
    return invalid_argument("say what to remove: --session, --chunk, --unused-for or --all");
  }
  if ((args.all ? 1 : 0) + (by_filter ? 1 : 0) + (args.session.empty() ? 0 : 1) > 1) {
    return invalid_argument("--session, --all and a filter exclude each other");
  }
  HCACHE_ASSIGN_OR_RETURN(const auto store, open(args, false));
  uint64_t chunks = 0;
  if (!args.session.empty()) {
    HCACHE_ASSIGN_OR_RETURN(chunks, store->delete_session(args.session));
  } else {
    store::RemoveFilter filter;
    if (!args.chunk.empty()) {
      ChunkId id;
      HCACHE_RETURN_IF_ERROR(parse_id(args.chunk, &id));
      filter.chunk = id;
    }
    if (args.unused_for_ns > 0) {
      filter.unused_since_ns = Env::real().wall_ns() - args.unused_for_ns;
    }
    if (args.all) {
      HCACHE_ASSIGN_OR_RETURN(const auto sessions, store->list_sessions());
      for (const store::SessionSummary& s : sessions) {
        HCACHE_ASSIGN_OR_RETURN(const uint64_t n, store->delete_session(s.name));
        chunks += n;
      }
    }
    HCACHE_ASSIGN_OR_RETURN(const uint64_t n, store->remove(filter));
    chunks += n;
  }
  HCACHE_RETURN_IF_ERROR(store->close());
  if (args.json) return write_json({{"chunks_removed", chunks}}, "");
  fmt::print("{} chunks removed\n", chunks);
  return {};
}

Status new_key(const KeyArgs& args) {
  if (args.file.empty()) return invalid_argument("--out names the key file to write");
  HCACHE_RETURN_IF_ERROR(store::make_store_key(Env::real(), args.file));
  fmt::print(
      "{} holds a new key. Keep a copy elsewhere: without it nothing that is encrypted with "
      "it can be read.\n",
      args.file);
  return {};
}

}  // namespace

void add_store(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand("store", "Look after the saved state");
  group->require_subcommand(1);
  add_verb<StoreArgs>(*group, verb, "stat", "What the store holds and how much room it takes",
                      stat);
  add_verb<ListArgs>(*group, verb, "ls", "List the conversations, or the chunks", list);
  add_verb<VerifyArgs>(*group, verb, "verify", "Read everything and check every byte", verify);
  add_verb<RepairArgs>(*group, verb, "repair",
                       "Compare the catalog with what the disks say, and mend it", repair);
  add_verb<StoreArgs>(*group, verb, "gc", "Give back room that nothing uses", gc);
  add_verb<ExportArgs>(*group, verb, "export", "Write a conversation with its state to a file",
                       export_session);
  add_verb<ImportArgs>(*group, verb, "import", "Take in a conversation from such a file",
                       import_session);
  add_verb<RemoveArgs>(*group, verb, "rm", "Remove a conversation or chunks", remove);
  add_verb<KeyArgs>(*group, verb, "new-key", "Make a key for --encrypt-key-file", new_key);
}

}  // namespace hcache::cli
