//go:build ignore

// Writes and reads traffic files with TiProxy's own code; see README.md.
package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/pingcap/tiproxy/lib/util/errors"
	pnet "github.com/pingcap/tiproxy/pkg/proxy/net"
	"github.com/pingcap/tiproxy/pkg/sqlreplay/cmd"
	"github.com/pingcap/tiproxy/pkg/sqlreplay/store"
	"go.uber.org/zap"
)

type shown struct {
	TimeNs       int64  `json:"time_ns"`
	Connection   uint64 `json:"connection"`
	Command      string `json:"command"`
	IsSuccess    bool   `json:"is_success"`
	PreparedID   uint32 `json:"prepared_id"`
	PreparedText string `json:"prepared_text_hex"`
	Payload      string `json:"payload_hex"`
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "ERROR:", err)
		os.Exit(1)
	}
}

func show(c *cmd.Command) {
	line, err := json.Marshal(shown{
		TimeNs: c.StartTs.UnixNano(), Connection: c.ConnID, Command: c.Type.String(), IsSuccess: c.Success,
		PreparedID: c.CapturedPsID, PreparedText: hex.EncodeToString([]byte(c.PreparedStmt)),
		Payload: hex.EncodeToString(c.Payload[1:]),
	})
	check(err)
	fmt.Println(string(line))
}

func read(dir string) {
	storage, err := store.NewStorage(dir)
	check(err)
	var meta store.Meta
	if err := meta.Read(storage); err != nil {
		fmt.Fprintln(os.Stderr, "no meta:", err)
	} else {
		fmt.Fprintf(os.Stderr, "meta: %+v\n", meta)
	}
	reader, err := store.NewReader(zap.NewNop(), storage, store.ReaderCfg{Dir: dir, Format: cmd.FormatNative})
	check(err)
	defer reader.Close()
	decoder := cmd.NewCmdDecoder(cmd.FormatNative, nil, zap.NewNop())
	count := 0
	for {
		c, err := decoder.Decode(reader)
		if errors.Is(err, io.EOF) {
			break
		}
		check(err)
		show(c)
		count++
	}
	fmt.Fprintln(os.Stderr, "commands:", count)
}

func commands(zone *time.Location) []*cmd.Command {
	start := time.Unix(1795818422, 0)
	at := func(n int64) time.Time { return start.Add(time.Duration(n)).In(zone) }
	packet := func(c pnet.Command, payload string) []byte { return append([]byte{c.Byte()}, payload...) }
	var all []*cmd.Command
	add := func(ns int64, conn uint64, c pnet.Command, payload string) *cmd.Command {
		command := cmd.NewCommand(packet(c, payload), at(ns), conn)
		all = append(all, command)
		return command
	}
	add(0, 1, pnet.ComInitDB, "shop")
	add(123456789, 1, pnet.ComQuery, "SELECT * FROM orders WHERE id = 1")
	add(200000000, 2, pnet.ComQuery, "SET SESSION_STATES '{\"sys-vars\": {\"sql_mode\": \"\"}}'")
	add(200000001, 1, pnet.ComQuery, "SELECT 'two\nlines',\n# Payload_len: 5\n'\xff\x00'")
	add(200000002, 2, pnet.ComQuery, "SELECT missing").Success = false
	add(300000000, 2, pnet.ComStmtPrepare, "SELECT ?\n\t\"ä\\\"").CapturedPsID = 3
	execute := add(300000100, 2, pnet.ComStmtExecute, "\x03\x00\x00\x00\x00\x01\x00\x00\x00\x00\x01\x08\x00\n\n\n\x00\x00\x00\x00\x00")
	execute.CapturedPsID = 3
	execute.PreparedStmt = "SELECT ?\n\t\"ä\\\"\x00\x07\x7f\xff\u0085\u00ad\u2028😀"
	add(300000200, 2, pnet.ComStmtSendLongData, "\x03\x00\x00\x00\x00\x00long\r\n").CapturedPsID = 3
	add(300000300, 2, pnet.ComStmtFetch, "\x03\x00\x00\x00\x01\x00\x00\x00").CapturedPsID = 3
	add(300000400, 2, pnet.ComStmtReset, "\x03\x00\x00\x00").CapturedPsID = 3
	add(300000500, 2, pnet.ComStmtClose, "\x03\x00\x00\x00").CapturedPsID = 3
	add(400000000, 1, pnet.ComPing, "")
	add(400000001, 1, pnet.ComFieldList, "orders\x00%")
	add(400000002, 1, pnet.ComStatistics, "")
	add(400000003, 1, pnet.ComSetOption, "\x00\x00")
	add(400000004, 1, pnet.ComProcessInfo, "")
	add(400000005, 1, pnet.ComProcessKill, "\x01\x00\x00\x00")
	add(400000006, 1, pnet.ComRefresh, "\x01")
	add(400000007, 1, pnet.ComDebug, "")
	add(400000008, 1, pnet.ComResetConnection, "")
	add(500000000, 18446744073709551615, pnet.ComQuery, "")
	add(600000000, 1, pnet.ComQuit, "")
	return all
}

// Writes the commands as capture.go does: encodes into a buffer, which goes to the writer. Prints them.
func write(dir string, compress bool, zone *time.Location) {
	check(os.MkdirAll(dir, 0o755))
	storage, err := store.NewStorage(dir)
	check(err)
	// The size makes it rotate.
	writer, err := store.NewWriter(zap.NewNop(), storage, store.WriterCfg{Dir: dir, Compress: compress, FileSize: 1200})
	check(err)
	encoder := cmd.NewCmdEncoder(cmd.FormatNative)
	all := commands(zone)
	for _, c := range all {
		var buf bytes.Buffer
		check(encoder.Encode(c, &buf))
		_, err := writer.Write(buf.Bytes())
		check(err)
		time.Sleep(2 * time.Millisecond)
		show(c)
	}
	check(writer.Close())
	check(store.NewMeta(1500*time.Millisecond, uint64(len(all)), 2, "").Write(storage))
}

func main() {
	switch os.Args[1] {
	case "read":
		read(os.Args[2])
	case "write-plain":
		write(os.Args[2], false, time.FixedZone("", 8*3600))
	case "write-gzip":
		write(os.Args[2], true, time.UTC)
	}
}
