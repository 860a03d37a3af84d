// Runs the steps of tests/support/clients/python/script.py with go-sql-driver/mysql.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"
)

// notSupported names a feature that the driver lacks.
type notSupported string

func (reason notSupported) Error() string { return string(reason) }

func (p plan) step(name string) (string, error) {
	switch name {
	case "login":
		return p.login()
	case "wrong_password":
		return p.wrongPassword()
	case "ping":
		return p.ping()
	case "query_text":
		return p.queries(false, name)
	case "query_prepared":
		return p.queries(true, name)
	case "transactions":
		return p.transactions()
	case "rows_text":
		return p.bigResult(false, p.rows)
	case "rows_prepared":
		return p.bigResult(true, p.binary)
	case "blob_text":
		return p.bigValue(false)
	case "blob_prepared":
		return p.bigValue(true)
	case "multi":
		return p.multi()
	case "batch":
		return "", notSupported("no protocol of its own for batches")
	case "cursor":
		return "", notSupported("no server-side cursors")
	case "load_data":
		return p.loadData()
	case "change_user":
		return "", notSupported("no change of user")
	case "reset":
		return "", notSupported("no reset of a connection")
	case "kill":
		return p.kill()
	case "cut":
		return p.cut()
	}
	return "", fmt.Errorf("there is no step %s", name)
}

type line struct {
	Step    string  `json:"step"`
	OK      *bool   `json:"ok"`
	Detail  string  `json:"detail"`
	Seconds float64 `json:"seconds"`
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "pool" {
		if err := runPool(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	p, err := readPlan()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	output := json.NewEncoder(os.Stdout)
	for _, name := range p.steps {
		began := time.Now()
		detail, err := p.step(name)
		ok := err == nil
		report := line{Step: name, OK: &ok, Detail: detail, Seconds: time.Since(began).Seconds()}
		var unsupported notSupported
		if errors.As(err, &unsupported) {
			report.OK, report.Detail = nil, err.Error()
		} else if err != nil {
			report.Detail = fmt.Sprintf("%.300v", err)
		}
		if err := output.Encode(report); err != nil {
			os.Exit(1)
		}
	}
}
