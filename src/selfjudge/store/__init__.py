"""Files and folders that outlive a process: read through schemas, written whole, gone on with after a kill."""

from selfjudge.store.files import (
    check_page as check_page,
    fingerprint as fingerprint,
    home as home,
    hub_options as hub_options,
    locked as locked,
    markdown_table as markdown_table,
    parse_json as parse_json,
    quiet_hub as quiet_hub,
    read_json as read_json,
    read_rows as read_rows,
    read_tensors as read_tensors,
    scratch as scratch,
    sha256 as sha256,
    unreachable as unreachable,
    weight_files as weight_files,
    whole_tensors as whole_tensors,
    write_json as write_json,
    write_rows as write_rows,
    write_tensors as write_tensors,
    write_text as write_text,
)
from selfjudge.store.run_folder import (
    RunFolder as RunFolder,
    describe_machine as describe_machine,
    keep_settings as keep_settings,
    machine as machine,
    measured_on as measured_on,
    provenance as provenance,
    refuse_foreign as refuse_foreign,
    versions as versions,
)
