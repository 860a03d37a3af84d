// Steps about logins, statements and transactions.

package main

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/go-sql-driver/mysql"
)

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

// queries passes parameters to every statement, because the driver prepares only statements with parameters.
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
	outcome, err := wantError(err, 1146)
	if err != nil {
		return "", err
	}
	return "2 results, " + outcome, s.expect(3, "select 3")
}
