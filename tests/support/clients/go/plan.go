// The parameters of a run, from its environment.

package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/go-sql-driver/mysql"
)

type plan struct {
	base   mysql.Config
	rows   int64
	binary int64 // rows that prepared statements read
	blob   int
	long   int
	load   string
	loaded int64
	steps  []string
}

func readPlan() (plan, error) {
	config := mysql.NewConfig()
	config.Net = "tcp"
	config.Addr = os.Getenv("MATRIX_HOST") + ":" + os.Getenv("MATRIX_PORT")
	config.User = os.Getenv("MATRIX_USER")
	config.Passwd = os.Getenv("MATRIX_PASSWORD")
	config.DBName = os.Getenv("MATRIX_DATABASE")
	config.MultiStatements = true
	config.MaxAllowedPacket = 128 << 20
	config.AllowFallbackToPlaintext = false
	if ca := os.Getenv("MATRIX_CA"); ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return plan{}, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return plan{}, fmt.Errorf("no certificate in %s", ca)
		}
		if err := mysql.RegisterTLSConfig("matrix", &tls.Config{RootCAs: pool, ServerName: os.Getenv("MATRIX_HOST")}); err != nil {
			return plan{}, err
		}
		config.TLSConfig = "matrix"
	}
	read := plan{base: *config, load: os.Getenv("MATRIX_LOAD_FILE"), steps: strings.Fields(os.Getenv("MATRIX_STEPS"))}
	mysql.RegisterLocalFile(read.load)
	var err1, err2, err3, err4, err5 error
	read.binary, err5 = strconv.ParseInt(os.Getenv("MATRIX_ROWS_PREPARED"), 10, 64)
	read.rows, err1 = strconv.ParseInt(os.Getenv("MATRIX_ROWS"), 10, 64)
	read.blob, err2 = strconv.Atoi(os.Getenv("MATRIX_BLOB"))
	read.loaded, err3 = strconv.ParseInt(os.Getenv("MATRIX_LOAD_ROWS"), 10, 64)
	read.long, err4 = strconv.Atoi(os.Getenv("MATRIX_LONG"))
	return read, errors.Join(err1, err2, err3, err4, err5)
}
