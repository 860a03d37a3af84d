// The script of tests/clients/python/script.py with go-sql-driver/mysql.
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

const (
	deadline = 20 * time.Second // until the server has noticed something
	sleep    = 60               // seconds a query would last that is to be killed
)

// notSupported says what the driver does not have.
type notSupported string

func (reason notSupported) Error() string { return string(reason) }

type plan struct {
	base   mysql.Config
	other  string
	rows   int64
	binary int64 // rows, as prepared statement
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

// session is one connection. With interpolate its queries with parameters go in the text protocol.
type session struct {
	*sql.Conn
	pool *sql.DB
}

func (p plan) open(interpolate bool, change func(*mysql.Config)) (session, error) {
	config := p.base.Clone()
	config.InterpolateParams = interpolate
	if change != nil {
		change(config)
	}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return session{}, err
	}
	pool := sql.OpenDB(connector)
	conn, err := pool.Conn(context.Background())
	if err != nil {
		pool.Close()
		return session{}, err
	}
	return session{conn, pool}, nil
}

func (s session) close() {
	s.Conn.Close()
	s.pool.Close()
}

func (s session) exec(query string, parameters ...any) error {
	_, err := s.ExecContext(context.Background(), query, parameters...)
	return err
}

func (s session) number(query string, parameters ...any) (int64, error) {
	var number int64
	err := s.QueryRowContext(context.Background(), query, parameters...).Scan(&number)
	return number, err
}

func (s session) expect(wanted int64, query string, parameters ...any) error {
	got, err := s.number(query, parameters...)
	if err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	if got != wanted {
		return fmt.Errorf("%s: %d, not %d", query, got, wanted)
	}
	return nil
}

// first is the first error, so that steps read as lists of what they do.
func first(actions ...func() error) error {
	for _, action := range actions {
		if err := action(); err != nil {
			return err
		}
	}
	return nil
}

func wantError(err error, code uint16) (string, error) {
	var answer *mysql.MySQLError
	if errors.As(err, &answer) && answer.Number == code {
		return fmt.Sprintf("error %d", code), nil
	}
	return "", fmt.Errorf("wanted error %d, got %v", code, err)
}

func (p plan) login() (string, error) {
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	var account, database string
	err = first(
		func() error { return s.QueryRowContext(context.Background(), "select database()").Scan(&database) },
		func() error { return s.QueryRowContext(context.Background(), "select current_user()").Scan(&account) },
	)
	user, _, _ := strings.Cut(account, "@")
	return user + " in " + database, err
}

func (p plan) wrongPassword() (string, error) {
	s, err := p.open(true, func(config *mysql.Config) { config.Passwd = "not the password" })
	if err == nil {
		s.close()
	}
	return wantError(err, 1045)
}

func (p plan) ping() (string, error) {
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	ping := func() error { return s.PingContext(context.Background()) }
	return "", first(ping, func() error { return s.expect(1, "select 1") }, ping)
}

type row struct {
	id    int64
	name  string
	big   int64
	ratio float64
	note  sql.NullString
}

func (s session) rows(query string, parameters ...any) ([]row, error) {
	found, err := s.QueryContext(context.Background(), query, parameters...)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	var all []row
	for found.Next() {
		var r row
		if err := found.Scan(&r.id, &r.name, &r.big, &r.ratio, &r.note); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, found.Err()
}

// queries: with parameters in every statement, since the driver prepares only those that have some.
func (p plan) queries(prepared bool, table string) (string, error) {
	s, err := p.open(!prepared, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	var rows []row
	for i := int64(0); i < 20; i++ {
		r := row{i, fmt.Sprintf("Zeile %d 🌊", i), 1<<32 + i, float64(i) / 4, sql.NullString{}}
		if i%2 == 0 {
			r.note = sql.NullString{String: strings.Repeat("x", int(i)*20), Valid: true}
		}
		rows = append(rows, r)
	}
	err = first(
		func() error { return s.exec("drop table if exists " + table) },
		func() error {
			return s.exec("create table " + table + " (id int primary key, name varchar(200) character set utf8mb4, big bigint, ratio double, note text)")
		},
	)
	if err != nil {
		return "", err
	}
	for _, r := range rows {
		if err := s.exec("insert into "+table+" values (?, ?, ?, ?, ?)", r.id, r.name, r.big, r.ratio, r.note); err != nil {
			return "", err
		}
	}
	columns := "select id, name, big, ratio, note from " + table
	same := func(wanted []row, query string, parameters ...any) error {
		got, err := s.rows(query, parameters...)
		if err == nil && fmt.Sprint(got) != fmt.Sprint(wanted) {
			err = fmt.Errorf("%s: %.120v, not %.120v", query, got, wanted)
		}
		return err
	}
	err = first(
		func() error { return same(rows, columns+" where id >= ? order by id", 0) },
		func() error { return same(rows[:1], columns+" where id = ?", 0) },
		func() error { return same(rows[1:2], columns+" where id = ?", 1) },
		func() error { return same(rows[2:3], columns+" where id = ?", 2) },
		func() error { return same(nil, columns+" where id = ?", -1) },
		func() error { return s.exec("update "+table+" set name = ? where id >= ?", "neu", 10) },
		func() error { return s.exec("delete from "+table+" where id = ?", 19) },
		func() error { return s.expect(9, "select count(*) from "+table+" where name = ?", "neu") },
	)
	if err != nil {
		return "", err
	}
	var long string
	if err := s.QueryRowContext(context.Background(), "select repeat('y', ?)", p.long).Scan(&long); err != nil || long != strings.Repeat("y", p.long) {
		return "", fmt.Errorf("a long value: %d bytes, %v", len(long), err)
	}
	absent, err := wantError(s.exec("select * from absent where 1 = ?", 1), 1146)
	if err != nil {
		return "", err
	}
	duplicate, err := wantError(s.exec("insert into "+table+" values (?, 'x', 1, 1, null)", 1), 1062)
	if err != nil {
		return "", err
	}
	return "20 rows, " + absent + ", " + duplicate, s.exec("drop table " + table)
}

func (p plan) transactions() (string, error) {
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	second, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer second.close()
	err = first(
		func() error { return s.exec("drop table if exists tx") },
		func() error { return s.exec("create table tx (id int primary key) engine=innodb") },
	)
	if err != nil {
		return "", err
	}
	for number, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
		tx, err := s.BeginTx(context.Background(), nil)
		if err != nil {
			return "", err
		}
		if _, err := tx.Exec("insert into tx values (?)", number); err != nil {
			return "", err
		}
		var own int64
		if err := tx.QueryRow("select count(*) from tx").Scan(&own); err != nil || own != int64(number)+1 {
			return "", fmt.Errorf("own rows: %d, %v", own, err)
		}
		err = first(
			func() error { return second.expect(int64(number), "select count(*) from tx") },
			func() error { return end(tx) },
			func() error { return second.expect(1, "select count(*) from tx") },
		)
		if err != nil {
			return "", err
		}
	}
	return "0 1 1", s.exec("drop table tx")
}

func (p plan) bigResult(prepared bool, rows int64) (string, error) {
	s, err := p.open(!prepared, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	found, err := s.QueryContext(context.Background(), "select n from numbers where n <= ?", rows)
	if err != nil {
		return "", err
	}
	defer found.Close()
	var count, sum, n int64
	for found.Next() {
		if err := found.Scan(&n); err != nil {
			return "", err
		}
		count++
		sum += n
	}
	if count != rows || sum != rows*(rows+1)/2 {
		return "", fmt.Errorf("%d rows, sum %d, %v", count, sum, found.Err())
	}
	return fmt.Sprintf("%d rows", count), found.Err()
}

func (p plan) bigValue(prepared bool) (string, error) {
	s, err := p.open(!prepared, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	blob := make([]byte, p.blob)
	if _, err := rand.Read(blob); err != nil {
		return "", err
	}
	err = first(
		func() error { return s.exec("drop table if exists blobs") },
		func() error { return s.exec("create table blobs (id int primary key, data longblob)") },
		func() error { return s.exec("insert into blobs values (?, ?)", 1, blob) },
	)
	if err != nil {
		return "", err
	}
	var data []byte
	var there string
	if err := s.QueryRowContext(context.Background(), "select data, sha2(data, 256) from blobs where id = ?", 1).Scan(&data, &there); err != nil {
		return "", err
	}
	sent, back := sha256.Sum256(blob), sha256.Sum256(data)
	if sent != back || hex.EncodeToString(sent[:]) != there {
		return "", fmt.Errorf("sent %x, the server has %s, %x came back", sent, there, back)
	}
	return fmt.Sprintf("%d bytes", len(data)), s.exec("drop table blobs")
}

func (p plan) multi() (string, error) {
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	query := func(text string) ([]int64, error) {
		found, err := s.QueryContext(context.Background(), text)
		if err != nil {
			return nil, err
		}
		defer found.Close()
		var values []int64
		for {
			for found.Next() {
				var value int64
				if err := found.Scan(&value); err != nil {
					return nil, err
				}
				values = append(values, value)
			}
			if !found.NextResultSet() {
				return values, found.Err()
			}
		}
	}
	values, err := query("select 1; drop table if exists multi; create table multi (id int); " +
		"insert into multi values (1), (2); select count(*) from multi; drop table multi")
	if err != nil || fmt.Sprint(values) != "[1 2]" {
		return "", fmt.Errorf("results: %v, %v", values, err)
	}
	_, err = query("select 1; select * from absent; select 2")
	told, err := wantError(err, 1146)
	if err != nil {
		return "", err
	}
	return "2 results, " + told, s.expect(3, "select 3")
}

func (p plan) loadData() (string, error) {
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	return fmt.Sprintf("%d rows", p.loaded), first(
		func() error { return s.exec("drop table if exists loaded") },
		func() error { return s.exec("create table loaded (id int primary key, name varchar(50))") },
		func() error { return s.exec("load data local infile '" + p.load + "' into table loaded") },
		func() error { return s.expect(p.loaded, "select count(*) from loaded") },
		func() error { return s.expect(p.loaded*(p.loaded-1)/2, "select sum(id) from loaded") },
		func() error { return s.exec("drop table loaded") },
	)
}

// until waits until the server lists the connection so many times, on that condition.
func (s session) until(count, connection int64, condition string) error {
	query := fmt.Sprintf("select count(*) from information_schema.processlist where id = %d %s", connection, condition)
	for end := time.Now().Add(deadline); ; time.Sleep(20 * time.Millisecond) {
		got, err := s.number(query)
		if err != nil || got == count {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s is %d", deadline, query, count)
		}
	}
}

func (p plan) kill() (string, error) {
	victim, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer victim.close()
	killer, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer killer.close()
	number, err := victim.number("select connection_id()")
	if err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() {
		_, err := victim.number(fmt.Sprintf("select sleep(%d)", sleep))
		ended <- err
	}()
	err = first(
		func() error { return killer.until(1, number, "and info like 'select sleep%'") },
		func() error { return killer.exec(fmt.Sprintf("kill %d", number)) },
	)
	if err != nil {
		return "", err
	}
	var answer *mysql.MySQLError
	select {
	case err = <-ended:
	case <-time.After(deadline):
		return "", errors.New("the query goes on")
	}
	told := "connection lost"
	if errors.As(err, &answer) {
		told = fmt.Sprintf("error %d", answer.Number)
	} else if !errors.Is(err, mysql.ErrInvalidConn) {
		return "", fmt.Errorf("neither an answer nor a lost connection: %v", err)
	}
	return told, killer.until(0, number, "")
}

func (p plan) cut() (string, error) {
	other, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer other.close()
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	number, err := s.number("select connection_id()")
	if err != nil {
		return "", err
	}
	vanish, cancel := context.WithCancel(context.Background())
	defer cancel()
	found, err := s.QueryContext(vanish, "select n, repeat('x', 100) from numbers")
	if err != nil {
		return "", err
	}
	for i := 0; i < 1000; i++ {
		if !found.Next() {
			return "", fmt.Errorf("only %d rows: %v", i, found.Err())
		}
	}
	if err := other.until(1, number, ""); err != nil {
		return "", err
	}
	cancel() // the driver closes the connection without a word
	if err := other.until(0, number, ""); err != nil {
		return "", err
	}
	found.Close()
	fresh, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer fresh.close()
	return "", fresh.expect(1, "select 1")
}

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
		told := line{Step: name, OK: &ok, Detail: detail, Seconds: time.Since(began).Seconds()}
		var unsupported notSupported
		if errors.As(err, &unsupported) {
			told.OK, told.Detail = nil, err.Error()
		} else if err != nil {
			told.Detail = fmt.Sprintf("%.300v", err)
		}
		if err := output.Encode(told); err != nil {
			os.Exit(1)
		}
	}
}
